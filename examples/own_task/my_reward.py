"""The reward of this task. It is tried on the first prompts before anything starts."""


def score(prompt, response):
    """The share of the text that is the answer: 1 for the answer alone, 0 for a text without it."""
    text = response.text.strip().rstrip(".").lower()
    answer = prompt.answer.lower()
    share = len(answer) / len(text) if answer in text else 0.0
    return {"score": share, "correct": text == answer, "contains": answer in text}
