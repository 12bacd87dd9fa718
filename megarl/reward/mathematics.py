"""Mathematical equality of the stated answer and the expected one (in a scoring process)."""

import importlib.util

from megarl.config.errors import ConfigError
from megarl.config.schema.reward import MathRewardConfig
from megarl.reward.answers.extraction import ends_in_open_thinking
from megarl.reward.scoring_process import ScoringProcess, check_timeout
from megarl.types import Prompt, Response, Score


class MathReward:
    """1 where the response states the prompt's answer and no other one, else 0.

    The prompt's answer is LaTeX or plain (with or without $); one that cannot be read as mathematics is compared as
    text. What states an answer is reward.answer; the rules are in docs/environments-and-rewards.md. details: "format"
    is 1 where the response states one answer that can be read; "timeout" is 1 where reward.timeout_s passed, which
    counts as wrong.
    """

    def __init__(self, config: MathRewardConfig):
        """Raises ConfigError for a time that is not above 0 or without math-verify."""
        check_timeout(config.timeout_s)
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(["reward: math found, but math-verify is not installed; `make install` brings it"])
        self._mode = config.answer.value
        self._process = ScoringProcess("math", config.timeout_s)

    def __call__(self, prompt: Prompt, response: Response) -> Score:
        verdict = self._process.ask(
            {
                "gold": prompt.answer,
                "text": response.text,
                "mode": self._mode,
                "thinking": ends_in_open_thinking(prompt.text),
            }
        )
        if verdict is None:
            return Score(0.0, False, {"format": 0.0, "timeout": 1.0})
        correct, details = bool(verdict["correct"]), {"format": float(verdict["read"]), "timeout": 0.0}
        return Score(float(correct), correct, details, verdict["answer"])
