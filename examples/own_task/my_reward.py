"""The reward of this task. It is tried on the first prompts before anything starts."""


def score(prompt, response):
    """1 for the answer and nothing else, 0.3 for a text that contains it."""
    text = response.text.strip().rstrip(".")
    contains = prompt.answer.lower() in text.lower()
    exact = text.lower() == prompt.answer.lower()
    return {"score": 1.0 if exact else 0.3 * contains, "correct": exact, "contains": contains}
