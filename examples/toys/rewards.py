"""How reward=addition and reward=letter_count score responses to the toys' problems."""

import math
import re
from dataclasses import dataclass

from megarl.types import Prompt, Response, Score

ONLY_A_NUMBER = re.compile(r"-?[0-9]+\.?")
INTEGER = re.compile(r"-?[0-9]+")


def score_addition(prompt: Prompt, response: Response) -> Score:
    """1 where the response is the right number and nothing else, else 0.

    details: "format" is 1 where the response, spaces at its ends aside, is one integer (a full stop may
    follow); "number" is 1 where the last integer of the response is right, whatever stands around it. Both 1
    is correct. Raises ValueError, naming the prompt, where its answer is not an integer.
    """
    expected, text = prompt.answer.strip(), response.text.strip()
    if INTEGER.fullmatch(expected) is None:
        needed = "reward=addition needs an integer, such as 85 (data=addition makes such prompts)"
        raise ValueError(f"prompt {prompt.id!r}: answer {prompt.answer!r} found; {needed}")
    integers = INTEGER.findall(text)
    well_formed = ONLY_A_NUMBER.fullmatch(text) is not None
    # As texts: int() refuses thousands of digits.
    right = bool(integers) and _canonical(integers[-1]) == _canonical(expected)
    correct = well_formed and right
    answer = _canonical(integers[-1]) if well_formed else None
    return Score(float(correct), correct, {"format": float(well_formed), "number": float(right)}, answer)


def _canonical(digits: str) -> str:
    magnitude = digits.lstrip("-").lstrip("0") or "0"
    return f"-{magnitude}" if digits.startswith("-") and magnitude != "0" else magnitude


LETTERS_CORRECT_AT = 0.9
"""The least reward that counts as correct."""


@dataclass(frozen=True)
class LetterCountReward:
    """reward = (share of the characters that are the letter) * g(length / number), see `compute_length_score`.

    The length is that of the response text in characters; one cut at the length limit counts with the length
    it has. An empty response gets 0. Correct from 0.9 on. details: {"letters": the share, "length": g}.
    """

    tolerance: float
    falloff: float

    def __call__(self, prompt: Prompt, response: Response) -> Score:
        """Raises ValueError, naming the prompt, for an answer that is no letter with a number, such as b37."""
        asked = re.fullmatch(r"([a-z])([1-9][0-9]*)", prompt.answer)
        if asked is None:
            needed = (
                "reward=letter_count needs a letter and a number, such as b37 (data=letter_count makes such prompts)"
            )
            raise ValueError(f"prompt {prompt.id!r}: answer {prompt.answer!r} found; {needed}")
        length = len(response.text)
        share = response.text.count(asked[1]) / length if length else 0.0
        fit = compute_length_score(length / int(asked[2]), self.tolerance, self.falloff)
        reward = share * fit
        return Score(reward, reward >= LETTERS_CORRECT_AT, {"letters": share, "length": fit})


def compute_length_score(ratio: float, tolerance: float, falloff: float) -> float:
    """g(r) = clamp(1 - max(0, |log r| - log tolerance) / log falloff, 0, 1); 0 for r = 0."""
    if ratio <= 0:
        return 0.0
    excess = max(0.0, abs(math.log(ratio)) - math.log(tolerance))
    return max(0.0, 1.0 - excess / math.log(falloff))
