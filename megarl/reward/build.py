"""From the `reward` group to the function that scores a response."""

from collections.abc import Callable

from megarl.config.errors import ConfigError
from megarl.config.reward import (
    AboutRewardConfig,
    AdditionRewardConfig,
    ExactRewardConfig,
    FunctionRewardConfig,
    MathRewardConfig,
    ReasoningGymRewardConfig,
    RewardConfig,
)
from megarl.reward.about import AboutReward
from megarl.reward.addition import score_addition
from megarl.reward.exact import score_exact
from megarl.reward.function import load_reward_function
from megarl.reward.gym import ReasoningGymReward
from megarl.reward.mathematics import MathReward
from megarl.types import Prompt, Response, Score

RewardFunction = Callable[[Prompt, Response], Score]


def build_reward(config: RewardConfig) -> RewardFunction:
    """The verifier of this configuration; it may be called from any thread.

    Raises ConfigError naming the key that is out of range, or what is not installed or not importable.
    """
    match config:
        case AboutRewardConfig():
            return AboutReward(config)
        case AdditionRewardConfig():
            return score_addition
        case ExactRewardConfig():
            return score_exact
        case MathRewardConfig():
            return MathReward(config)
        case ReasoningGymRewardConfig():
            return ReasoningGymReward(config)
        case FunctionRewardConfig():
            return load_reward_function(config.path)
    raise ConfigError([f"reward: found a {type(config).__name__}; megarl/reward/build.py has no verifier for it"])
