"""Mathematical equality of the stated answer and the expected one (in a process of its own)."""

import importlib.util
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.schema.reward import MathRewardConfig
from megarl.reward.answers.extraction import ends_in_open_thinking
from megarl.types import Prompt, Response, Score


class MathVerifier:
    """1 where the response states the prompt's answer and no other one, else 0.

    The prompt's answer is LaTeX or plain (with or without $); one that cannot be read as mathematics is compared as
    text. What states an answer is reward.answer; the rules are in docs/environments-and-rewards.md. details: "format"
    is 1 where the response states one answer that can be read; "timeout" is 1 where time or memory ran out, which
    counts as wrong.
    """

    path = "megarl.reward.served_scorers:build_math_scorer"
    key = "reward"
    is_users = False

    def __init__(self, config: MathRewardConfig):
        """Raises ConfigError without math-verify."""
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(["reward: math found, but math-verify is not installed; `make install` brings it"])
        self.options: dict[str, Any] = {}
        self.timeout_s, self.memory_gb = config.timeout_s, config.memory_gb
        self._mode = config.answer.value

    def ask(self, prompt: Prompt, response: Response) -> dict[str, Any]:
        return {
            "gold": prompt.answer,
            "text": response.text,
            "mode": self._mode,
            "thinking": ends_in_open_thinking(prompt.text),
        }

    def read(self, answer: Any, prompt: Prompt) -> Score:
        correct, details = bool(answer["correct"]), {"format": float(answer["read"]), "timeout": 0.0}
        return Score(float(correct), correct, details, answer["answer"])

    def give_up(self) -> Score:
        """A response that cannot be compared in time is wrong."""
        return Score(0.0, False, {"format": 0.0, "timeout": 1.0})
