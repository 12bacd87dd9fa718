"""The tiny task: a prompt `b...=` has the answer "b12", which asks for about 12 letters b."""

import math
import re

from megarl.config.errors import ConfigError
from megarl.config.schema.reward import LetterCountRewardConfig
from megarl.types import Prompt, Response, Score

CORRECT_AT = 0.9
"""The least reward that counts as correct."""


class LetterCountReward:
    """reward = (share of the characters that are the letter) * g(length / number), see `compute_length_score`.

    The length is that of the response text in characters; one cut at the length limit counts with the length
    it has. An empty response gets 0. Correct from 0.9 on. details: {"letters": the share, "length": g}.
    """

    def __init__(self, config: LetterCountRewardConfig):
        """Raises ConfigError for a tolerance below 1 or a falloff of 1 or less."""
        problems = []
        if not config.tolerance >= 1:
            problems.append(f"reward.tolerance: found {config.tolerance}; it must be 1 or more")
        if not config.falloff > 1:
            problems.append(f"reward.falloff: found {config.falloff}; it must be above 1")
        if problems:
            raise ConfigError(problems)
        self._tolerance, self._falloff = config.tolerance, config.falloff

    def __call__(self, prompt: Prompt, response: Response) -> Score:
        letter, number = parse_request(prompt)
        length = len(response.text)
        share = response.text.count(letter) / length if length else 0.0
        fit = compute_length_score(length / number, self._tolerance, self._falloff)
        reward = share * fit
        return Score(reward, reward >= CORRECT_AT, {"letters": share, "length": fit})


def compute_length_score(ratio: float, tolerance: float, falloff: float) -> float:
    """g(r) = clamp(1 - max(0, |log r| - log tolerance) / log falloff, 0, 1); 0 for r = 0."""
    if ratio <= 0:
        return 0.0
    excess = max(0.0, abs(math.log(ratio)) - math.log(tolerance))
    return max(0.0, 1.0 - excess / math.log(falloff))


def parse_request(prompt: Prompt) -> tuple[str, int]:
    """(letter, number) of an answer such as "b37". Raises ValueError naming the prompt."""
    found = re.fullmatch(r"([a-z])([1-9][0-9]*)", prompt.answer)
    if found is None:
        raise ValueError(
            f"prompt {prompt.id!r}: answer {prompt.answer!r} found; reward=letter_count compares with a letter and a"
            " number, such as b37 (data=letter_count makes such prompts)"
        )
    return found.group(1), int(found.group(2))
