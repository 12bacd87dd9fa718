"""Mathematical equality, by math-verify (in a scoring process)."""

import importlib.util

from megarl.config.errors import ConfigError
from megarl.config.schema.reward import MathRewardConfig
from megarl.reward.exact import normalize_text
from megarl.reward.scoring_process import ScoringProcess, check_timeout
from megarl.types import Prompt, Response, Score


class MathReward:
    """1 where the answer that the response states equals the prompt's mathematically, else 0.

    The prompt's answer is LaTeX or plain (with or without $ or \\boxed); one that cannot be read as
    mathematics is compared as text. details: "format" is 1 where the response states an answer that can be
    read; "timeout" is 1 where reward.timeout_s passed, which counts as wrong.
    """

    def __init__(self, config: MathRewardConfig):
        """Raises ConfigError for a time that is not above 0, or without math-verify."""
        check_timeout(config.timeout_s)
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(["reward: math found, but math-verify is not installed; `make install` brings it"])
        self._process = ScoringProcess("math", config.timeout_s)

    def __call__(self, prompt: Prompt, response: Response) -> Score:
        verdict = self._process.ask({"gold": prompt.answer, "text": response.text})
        if verdict is None:
            return Score(0.0, False, {"format": 0.0, "timeout": 1.0})
        equal, answer = bool(verdict["equal"]), verdict["answer"]
        if not verdict["gold_read"]:
            text = normalize_text(response.text)
            equal, answer = text == normalize_text(prompt.answer), text or None
        return Score(float(equal), equal, {"format": float(verdict["answer_read"]), "timeout": 0.0}, answer)
