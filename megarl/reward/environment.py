"""The environment's own rewards as the only ones."""

import math

from megarl.config.errors import ConfigError
from megarl.config.schema.reward import EnvironmentRewardConfig
from megarl.types import Prompt, Response, Score


class EnvironmentReward:
    """Adds nothing to the rewards of the turns; correct where their sum is at least correct_at.

    The rewards of the turns are part of every sample's reward, whatever `reward=` is: the score here is 0.
    """

    def __init__(self, config: EnvironmentRewardConfig):
        """Raises ConfigError for a correct_at that is not finite."""
        if not math.isfinite(config.correct_at):
            raise ConfigError([f"reward.correct_at: found {config.correct_at}; it must be a finite number"])
        self._correct_at = config.correct_at

    def __call__(self, prompt: Prompt, response: Response) -> Score:
        return Score(0.0, sum(turn.reward for turn in response.turns) >= self._correct_at)
