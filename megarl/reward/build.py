"""From the `reward` group to the function that scores a response."""

from collections.abc import Iterable

from megarl.algo.rewards import check_score
from megarl.config.errors import ConfigError
from megarl.config.schema.reward import (
    AdditionRewardConfig,
    EnvironmentRewardConfig,
    ExactRewardConfig,
    FunctionRewardConfig,
    LetterCountRewardConfig,
    MathRewardConfig,
    ReasoningGymRewardConfig,
    RewardConfig,
)
from megarl.reward.addition import score_addition
from megarl.reward.environment import EnvironmentReward
from megarl.reward.exact import score_exact
from megarl.reward.function import load_reward_function
from megarl.reward.gym import ReasoningGymReward
from megarl.reward.letter_count import LetterCountReward
from megarl.reward.mathematics import MathReward
from megarl.types import FinishReason, Prompt, Response, RewardFunction


def build_reward(config: RewardConfig) -> RewardFunction:
    """The verifier of this configuration; it may be called from any thread.

    Raises ConfigError naming the key that is out of range, or what is not installed or not importable.
    """
    match config:
        case LetterCountRewardConfig():
            return LetterCountReward(config)
        case AdditionRewardConfig():
            return score_addition
        case ExactRewardConfig():
            return score_exact
        case MathRewardConfig():
            return MathReward(config)
        case ReasoningGymRewardConfig():
            return ReasoningGymReward(config)
        case EnvironmentRewardConfig():
            return EnvironmentReward(config)
        case FunctionRewardConfig():
            return load_reward_function(config.path)
    raise ConfigError([f"reward: found a {type(config).__name__}; megarl/reward/build.py has no verifier for it"])


def reads_answers(config: RewardConfig) -> bool:
    """Whether this verifier fills Score.answer; a function of the user's may, too."""
    return isinstance(config, AdditionRewardConfig | ExactRewardConfig | MathRewardConfig)


def check_reward(reward: RewardFunction, prompts: Iterable[Prompt], wrong: float = 0.0) -> None:
    """Scores an empty response to each prompt, which shows whether the verifier can read the data's answers.

    Meant for the first prompt of each split, before anything is started. wrong: reward.wrong, with which the scores
    must be in [0, 1]. Raises ConfigError naming reward=... and data=... where the verifier raises ValueError; its other
    errors pass.
    """
    # One token of empty text: the end of the sequence, sampled at once.
    empty = Response((0,), "", (0.0,), (True,), (0,), FinishReason.stop)
    for prompt in prompts:
        try:
            check_score(reward(prompt, empty).reward, wrong)
        except ValueError as error:
            raise ConfigError(
                [f"reward=... with data=...: an empty response to a first prompt cannot be scored: {error}"]
            ) from error
