"""Numbers as answers, compared exactly or within a tolerance."""

import re
from collections import deque
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from megarl.config.schema.reward import NumericRewardConfig
from megarl.reward.format import check_pattern
from megarl.types import Prompt, Response, Score

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?|\.\d+"
NUMBER = re.compile(rf"(?<![\w.])[-+−]?\$?(?:{_DIGITS})(?:[eE][-+]?\d{{1,4}}(?!\d)|/\d+(?![.\d]))?", re.ASCII)
"""An integer or decimal, thousands with commas, scientific notation with up to 4 digits, or a/b"""
MAX_CHARACTERS = 1000
"""A longer number is not read."""


def parse_number(text: str) -> Fraction | None:
    """The number that the text is, exactly; None where it is none. $ before and % after it are left out."""
    text = text.strip().removesuffix("%").rstrip()
    if len(text) > MAX_CHARACTERS or not NUMBER.fullmatch(text):
        return None
    numerator, _, denominator = text.replace(",", "").replace("$", "").replace("−", "-").partition("/")
    if denominator:
        return Fraction(int(numerator), int(denominator)) if int(denominator) else None
    return Fraction(Decimal(numerator))


def find_last_number(text: str) -> Fraction | None:
    """The last number of the text."""
    last = deque(NUMBER.finditer(text), maxlen=1)
    return parse_number(last[0].group()) if last else None


def format_number(number: Fraction) -> str:
    """The same text for equal numbers: a decimal where it is exact with 28 digits, else a/b."""
    decimal = (Decimal(number.numerator) / Decimal(number.denominator)).normalize()
    if Fraction(decimal) != number:
        small = max(abs(number.numerator), number.denominator) < 10**MAX_CHARACTERS
        return f"{number.numerator}/{number.denominator}" if small else str(decimal)
    return f"{decimal:f}" if -30 < decimal.adjusted() < 30 else str(decimal)


@dataclass(frozen=True)
class NumericReward:
    """1 where the response's number is the prompt's answer, within the tolerances, else 0.

    details: "format" is 1 where the response has a number.
    """

    tolerance: Fraction
    relative_tolerance: Fraction

    @classmethod
    def of(cls, config: NumericRewardConfig) -> "NumericReward":
        # As written: 0.1 is a tenth.
        return cls(Fraction(repr(config.tolerance)), Fraction(repr(config.relative_tolerance)))

    def __call__(self, prompt: Prompt, response: Response) -> Score:
        """Of the response's last number. Raises ValueError, naming the prompt, where its answer is no number."""
        return self.compare(read_answer(prompt), find_last_number(response.text))

    def compare(self, expected: Fraction, found: Fraction | None) -> Score:
        """The score of a response with the number `found`."""
        if found is None:
            return Score(0.0, False, {"format": 0.0})
        margin = max(self.tolerance, self.relative_tolerance * abs(expected))
        correct = abs(found - expected) <= margin
        return Score(float(correct), correct, {"format": 1.0}, format_number(found))


def read_answer(prompt: Prompt) -> Fraction:
    """The expected number. Raises ValueError naming the prompt."""
    expected = parse_number(prompt.answer)
    if expected is None:
        raise ValueError(
            f"prompt {prompt.id!r}: answer {prompt.answer!r} found; reward=numeric needs a number, such as 85, 1,234.5"
            " or 3/4"
        )
    return expected


class NumericPatternVerifier:
    """As `NumericReward`, of the number that reward.pattern finds, which is searched in a process of its own."""

    path = "megarl.reward.served_scorers:build_pattern_searcher"
    key = "reward.pattern"
    is_users = False

    def __init__(self, config: NumericRewardConfig):
        """Raises ConfigError for a pattern that is none."""
        pattern = config.pattern or NUMBER.pattern
        check_pattern(pattern)
        self.options: dict[str, Any] = {"pattern": pattern, "where": "last"}
        self.timeout_s, self.memory_gb = config.timeout_s, config.memory_gb
        self._reward = NumericReward.of(config)

    def ask(self, prompt: Prompt, response: Response) -> dict[str, Any]:
        return {"text": response.text}

    def read(self, answer: Any, prompt: Prompt) -> Score:
        return self._reward.compare(read_answer(prompt), None if answer is None else parse_number(answer))

    def give_up(self) -> None:
        """What does not end is the pattern."""
