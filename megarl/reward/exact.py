"""Equality of texts."""

from megarl.types import Prompt, Response, Score


def score_exact(prompt: Prompt, response: Response) -> Score:
    """1 where the normalised response is the normalised answer, else 0."""
    answer = normalize_text(response.text)
    equal = answer == normalize_text(prompt.answer)
    return Score(reward=float(equal), correct=equal, answer=answer or None)


def normalize_text(text: str) -> str:
    """The text in lower case, runs of white space as one space, none at the ends, no full stop at the end."""
    return " ".join(text.casefold().split()).rstrip(".").rstrip()
