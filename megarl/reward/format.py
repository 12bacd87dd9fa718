"""The form of a response, as a regular expression (searched in a process of its own, which ends one without an end)."""

import re
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.schema.reward import FormatRewardConfig
from megarl.types import Prompt, Response, Score


class FormatVerifier:
    """1 where the response, white space at its ends aside, matches reward.pattern, else 0; its content does not count.

    With reward.anywhere a part that matches suffices.
    """

    path = "megarl.reward.served_scorers:build_pattern_searcher"
    key = "reward.pattern"
    is_users = False

    def __init__(self, config: FormatRewardConfig):
        """Raises ConfigError for a pattern that is none."""
        check_pattern(config.pattern)
        where = "anywhere" if config.anywhere else "whole"
        self.options: dict[str, Any] = {"pattern": config.pattern, "where": where}
        self.timeout_s, self.memory_gb = config.timeout_s, config.memory_gb

    def ask(self, prompt: Prompt, response: Response) -> dict[str, Any]:
        return {"text": response.text}

    def read(self, answer: Any, prompt: Prompt) -> Score:
        return Score(float(answer is not None), answer is not None)

    def give_up(self) -> None:
        """What does not end is the pattern."""


def check_pattern(pattern: str) -> None:
    """Raises ConfigError naming reward.pattern where Python cannot read it."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError([f"reward.pattern: found {pattern!r}; not a regular expression: {error}"]) from error
