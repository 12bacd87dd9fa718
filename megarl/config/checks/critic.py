"""Contradictions between the critic's keys and the rewards that it learns."""

from collections.abc import Iterator
from math import isfinite

from megarl.algo.registry import needs_critic
from megarl.config.errors import ConfigError
from megarl.config.reward_parts import read_parts
from megarl.config.schema import reward
from megarl.config.schema.algo_choices import NormScope
from megarl.config.schema.environment import SingleTurnEnvironmentConfig
from megarl.config.schema.root import Config

_UNKNOWN = (
    reward.FunctionRewardConfig,
    reward.HttpRewardConfig,
    reward.ScalarModelRewardConfig,
    reward.EnvironmentRewardConfig,
)
"""Kinds of reward whose scores may be any number; those of the others are from 0 to 1."""


def check_critic(config: Config) -> Iterator[str]:
    """One message per problem of critic.value_range and policy.frozen_iterations."""
    frozen, iterations = config.policy.frozen_iterations, config.train.num_iterations
    if frozen > 0 and not needs_critic(config.algo):
        yield (
            f"policy.frozen_iterations: found {frozen} with algo.advantage={config.algo.advantage}, which has no critic"
            " that could learn meanwhile; it must be 0"
        )
    elif frozen >= iterations > 0:
        yield (
            f"policy.frozen_iterations: found {frozen} with train.num_iterations={iterations}; the policy would never"
            f" learn: it must be below {iterations}, or 0. To train a critic alone: train.num_iterations=0"
        )
    if needs_critic(config.algo) and config.critic.value_range is not None:
        yield from _check_value_range(config, config.critic.value_range)


def _check_value_range(config: Config, value_range: list[float]) -> Iterator[str]:
    found, algo = f"critic.value_range: found {_show(*value_range)}", config.algo
    if len(value_range) != 2 or not all(map(isfinite, value_range)) or value_range[0] >= value_range[1]:
        yield f"{found}; it must be [low, high], two finite numbers with low below high, or null"
        return
    if algo.kl.in_reward:
        yield (
            f"{found} with algo.kl.in_reward=true; a return then has the KL of all tokens to come, which nothing"
            " bounds: it must be null, or algo.kl.in_reward=false (algo.kl.in_loss=true keeps the KL)"
        )
    norm = algo.reward_norm
    if norm.mean is not NormScope.none or norm.std is not NormScope.none:
        yield (
            f"{found} with algo.reward_norm.mean={norm.mean.name} and algo.reward_norm.std={norm.std.name}; normalized"
            " rewards have no fixed range: it must be null, or both none"
        )
    elif (returns := find_return_range(config)) is not None:
        low, high = returns
        if not value_range[0] <= low <= high <= value_range[1]:
            right = _show(min(low, value_range[0]), max(high, value_range[1]))
            yield (
                f"{found}; the returns that the critic learns are from {low:g} to {high:g}"
                f" (reward.wrong={config.reward.wrong:g}, algo.overlong.penalty={algo.overlong.penalty:g}), and a value"
                f" outside of its range can never be learned: it must contain them, as {right} does"
            )


def find_return_range(config: Config) -> tuple[float, float] | None:
    """The least and the largest return of a response without a KL or a normalization of rewards; None where the
    configuration does not say, because the scores, or an environment's rewards of turns, may be any number.
    """
    scores = _find_score_range(config.reward)
    if scores is None or not isinstance(config.environment, SingleTurnEnvironmentConfig):
        return None
    wrong, clip = config.reward.wrong, config.algo.reward_clip
    low, high = (wrong + (1 - wrong) * score for score in scores)
    low -= config.algo.overlong.penalty
    if clip is not None:
        low, high = (min(max(end, -clip), clip) for end in (low, high))
    return (min(low, 0.0), max(high, 0.0)) if config.algo.gamma < 1 else (low, high)


def _find_score_range(config: reward.RewardConfig) -> tuple[float, float] | None:
    if config.wrong != 0:
        return 0.0, 1.0  # every other score is refused
    if isinstance(config, reward.WeightedRewardConfig):
        try:
            parts = read_parts(config)
        except ConfigError:
            return None  # reported by check_parts
        if any(_find_score_range(part.config) is None for part in parts):
            return None
        return sum(min(part.weight, 0.0) for part in parts), sum(max(part.weight, 0.0) for part in parts)
    return None if isinstance(config, _UNKNOWN) else (0.0, 1.0)


def _show(*numbers: float) -> str:
    return f"[{', '.join(f'{number:g}' for number in numbers)}]"
