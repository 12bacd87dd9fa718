"""Generation with SGLang: servers, their client, and the collection of scored groups of responses."""
