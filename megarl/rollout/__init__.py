"""Generation with SGLang: launching servers, talking to them, collecting prompts into rewarded groups."""
