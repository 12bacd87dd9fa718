"""reasoning-gym's own scorers (in a process of their own)."""

import importlib.util
import json
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.schema.reward import ReasoningGymRewardConfig
from megarl.types import Prompt, Response, Score


class ReasoningGymVerifier:
    """The score, 0 to 1, that the prompt's task gives the response (white space at its ends removed).

    prompt.metadata["reasoning_gym"] is JSON: {"task": its name, "entry": the generated item, "config": the
    task's options (may be absent)}. Correct from reward.correct_at on. details: "timeout" is 1 where time or memory ran
    out, which scores 0.
    """

    path = "megarl.task.process_functions:build_reasoning_gym_scorer"
    key = "reward"
    is_users = False

    def __init__(self, config: ReasoningGymRewardConfig):
        """Raises ConfigError for values out of range, or without reasoning-gym."""
        if not 0 < config.correct_at <= 1:
            raise ConfigError([f"reward.correct_at: found {config.correct_at}; it must be above 0 and at most 1"])
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ConfigError(
                ["reward: reasoning_gym found, but that package is not installed; `make install` brings it"]
            )
        self.options: dict[str, Any] = {}
        self.timeout_s, self.memory_gb = config.timeout_s, config.memory_gb
        self._correct_at = config.correct_at

    def ask(self, prompt: Prompt, response: Response) -> dict[str, Any]:
        """Raises ValueError, naming the prompt, where it was not made by reasoning-gym."""
        return {**parse_task(prompt), "text": response.text.strip()}

    def read(self, answer: Any, prompt: Prompt) -> Score:
        reward = float(answer["score"])
        return Score(reward, reward >= self._correct_at, {"timeout": 0.0})

    def give_up(self) -> Score:
        """A response that cannot be scored in time is wrong."""
        return Score(0.0, False, {"timeout": 1.0})


def parse_task(prompt: Prompt) -> dict[str, Any]:
    """{"task", "entry", "config"} of a prompt. Raises ValueError naming the prompt and what is missing."""
    try:
        stored = json.loads(prompt.metadata["reasoning_gym"])
        return {"task": stored["task"], "entry": stored["entry"], "config": stored.get("config") or {}}
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"prompt {prompt.id!r}: no reasoning-gym task in its metadata ({type(error).__name__}: {error});"
            " reward=reasoning_gym goes with data=reasoning_gym"
        ) from error
