"""From the `reward` group to what scores a response."""

from megarl.config.errors import ConfigError
from megarl.config.reward_parts import RewardPart, read_parts
from megarl.config.schema.reward import (
    AdditionRewardConfig,
    CodeRewardConfig,
    EnvironmentRewardConfig,
    ExactRewardConfig,
    FormatRewardConfig,
    FunctionRewardConfig,
    HttpRewardConfig,
    JudgeRewardConfig,
    LengthRewardConfig,
    LetterCountRewardConfig,
    MathRewardConfig,
    NumericRewardConfig,
    ProcessRewardConfig,
    ReasoningGymRewardConfig,
    RewardConfig,
    ScalarModelRewardConfig,
    WeightedRewardConfig,
)
from megarl.reward.addition import score_addition
from megarl.reward.code import CodeReward
from megarl.reward.environment import EnvironmentReward
from megarl.reward.exact import score_exact
from megarl.reward.format import FormatVerifier
from megarl.reward.function import FunctionVerifier
from megarl.reward.gym import ReasoningGymVerifier
from megarl.reward.http import HttpReward
from megarl.reward.interface import AsyncReward, DirectReward, ProcessVerifier
from megarl.reward.judge import JudgeReward
from megarl.reward.length import LengthReward
from megarl.reward.letter_count import LetterCountReward
from megarl.reward.mathematics import MathVerifier
from megarl.reward.numeric import NumericPatternVerifier, NumericReward
from megarl.reward.pool import PooledReward, ProcessReward
from megarl.reward.reward_model import ScalarModelReward
from megarl.reward.weighted import Part, WeightedReward
from megarl.types import FinishReason, Response, RewardFunction


def build_async_reward(config: RewardConfig) -> AsyncReward:
    """The reward of this configuration, to be awaited.

    Raises ConfigError naming the key that is out of range, or what is not installed.
    """
    direct = build_direct(config)
    if direct is not None:
        return DirectReward(direct)
    match config:
        case CodeRewardConfig():
            return CodeReward(config)
        case HttpRewardConfig():
            return HttpReward(config)
        case ProcessRewardConfig():
            return PooledReward(build_verifier(config), config.num_workers)
        case JudgeRewardConfig():
            return JudgeReward(config)
        case ScalarModelRewardConfig():
            return ScalarModelReward(config)
        case WeightedRewardConfig():
            parts = {part.name: Part(_build_part(part), part.weight) for part in read_parts(config)}
            return WeightedReward(parts, config.correct_by, config.correct_at)
    raise ConfigError([f"reward: found a {type(config).__name__}; megarl/reward/build.py has no reward for it"])


def _build_part(part: RewardPart) -> AsyncReward:
    """Raises ConfigError with the full key of what is wrong."""
    try:
        return build_async_reward(part.config)
    except ConfigError as error:
        key = f"reward.parts.{part.name}"
        raise ConfigError(
            [key + text.removeprefix("reward") if text.startswith("reward") else text for text in error.problems]
        ) from error


def build_reward(config: RewardConfig) -> RewardFunction:
    """The reward of this configuration as a plain function, which may be called from any thread.

    A verifier that runs in processes of its own has one here. Raises ConfigError as `build_async_reward`, and where
    what the process loads is not importable.
    """
    direct = build_direct(config)
    if direct is not None:
        return direct
    if isinstance(config, ProcessRewardConfig) and not isinstance(config, CodeRewardConfig):
        reward = ProcessReward(build_verifier(config))
        reward.start()
        return reward
    raise ConfigError([f"reward: found a {type(config).__name__}, which is awaited; build_scorer() gives it"])


def build_direct(config: RewardConfig) -> RewardFunction | None:
    """The verifier that takes microseconds and is called in this process; None where the reward is of another sort."""
    match config:
        case LetterCountRewardConfig():
            return LetterCountReward(config)
        case AdditionRewardConfig():
            return score_addition
        case ExactRewardConfig():
            return score_exact
        case EnvironmentRewardConfig():
            return EnvironmentReward(config)
        case LengthRewardConfig():
            return LengthReward(config.min_length, config.max_length, config.falloff)
        case NumericRewardConfig() if config.pattern is None:
            return NumericReward.of(config)
    return None


def build_verifier(config: ProcessRewardConfig) -> ProcessVerifier:
    """The verifier whose work is done in processes of its own."""
    match config:
        case MathRewardConfig():
            return MathVerifier(config)
        case ReasoningGymRewardConfig():
            return ReasoningGymVerifier(config)
        case FunctionRewardConfig():
            return FunctionVerifier(config)
        case FormatRewardConfig():
            return FormatVerifier(config)
        case NumericRewardConfig():
            return NumericPatternVerifier(config)
    raise ConfigError([f"reward: found a {type(config).__name__}; megarl/reward/build.py has no verifier for it"])


def reads_answers(config: RewardConfig) -> bool:
    """Whether this verifier fills Score.answer; a function of the user's may, too."""
    if isinstance(config, WeightedRewardConfig):
        parts = {part.name: part.config for part in read_parts(config)}
        return any(map(reads_answers, [parts[config.correct_by]] if config.correct_by else parts.values()))
    return isinstance(config, AdditionRewardConfig | ExactRewardConfig | MathRewardConfig | NumericRewardConfig)


EMPTY = Response((0,), "", (0.0,), (True,), (0,), FinishReason.stop)
"""One token of empty text: the end of the sequence, sampled at once."""
