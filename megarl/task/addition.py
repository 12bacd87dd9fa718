"""Whole numbers as answers: wrong format and wrong number are counted apart."""

import re

from megarl.types import Prompt, Response, Score

ONLY_A_NUMBER = re.compile(r"-?[0-9]+\.?")
INTEGER = re.compile(r"-?[0-9]+")


def score_addition(prompt: Prompt, response: Response) -> Score:
    """1 where the response is the right number and nothing else, else 0.

    details: "format" is 1 where the response, spaces at its ends aside, is one integer (a full stop may
    follow); "number" is 1 where the last integer of the response is right, whatever stands around it. Both 1
    is correct. Raises ValueError, naming the prompt, where its answer is not an integer.
    """
    expected = _parse_answer(prompt)
    text = response.text.strip()
    integers = INTEGER.findall(text)
    well_formed = ONLY_A_NUMBER.fullmatch(text) is not None
    right = bool(integers) and _equals(integers[-1], expected)
    correct = well_formed and right
    answer = _canonical(integers[-1]) if well_formed else None
    return Score(float(correct), correct, {"format": float(well_formed), "number": float(right)}, answer)


def _parse_answer(prompt: Prompt) -> str:
    text = prompt.answer.strip()
    if INTEGER.fullmatch(text) is None:
        raise ValueError(
            f"prompt {prompt.id!r}: answer {prompt.answer!r} found; reward=addition needs an integer, such as 85"
            " (data=addition makes such prompts)"
        )
    return text


def _equals(left: str, right: str) -> bool:
    """Equal as integers; without int(), which refuses thousands of digits."""
    return _canonical(left) == _canonical(right)


def _canonical(digits: str) -> str:
    magnitude = digits.lstrip("-").lstrip("0") or "0"
    return f"-{magnitude}" if digits.startswith("-") and magnitude != "0" else magnitude
