"""A role: the layouts that Megatron's arithmetic does not allow, with the nearest numbers that it does, how it
computes, and what only a critic has.
"""

from collections.abc import Iterator
from math import isfinite, isqrt

from megarl.algo.registry import needs_critic
from megarl.config.errors import ConfigError
from megarl.config.reward_parts import read_parts
from megarl.config.schema.algo import NormScope, needs_reference
from megarl.config.schema.roles import Dtype, Offload, OptimizerConfig, ParallelConfig, TrainedRoleConfig
from megarl.config.schema.root import Config
from megarl.config.schema.task import (
    EnvironmentRewardConfig,
    FunctionRewardConfig,
    HttpRewardConfig,
    RewardConfig,
    ScalarModelRewardConfig,
    SingleTurnEnvironmentConfig,
    WeightedRewardConfig,
)

MAX_PROCESSES = 100_000


def check_parallel(key: str, parallel: ParallelConfig, samples_per_minibatch: int) -> Iterator[str]:
    """One message per problem of the layout under `key`; what depends on the model is checked with the model."""
    names = ("num_processes", "tp", "pp", "vpp", "cp", "ep", "etp")
    bad = [
        f"{key}.{name}: found {value}; it must be 1 or more and at most {MAX_PROCESSES}"
        for name in names
        if not 1 <= (value := getattr(parallel, name)) <= MAX_PROCESSES
    ]
    yield from bad
    if bad:
        return
    yield from _check_product(key, parallel, samples_per_minibatch)
    if parallel.sp and parallel.tp == 1:
        yield f"{key}.sp: found true at tp 1; it splits over tensor-parallel ranks: set {key}.tp, or sp=false"
    if parallel.vpp > 1 and parallel.pp == 1:
        yield (
            f"{key}.vpp: found {parallel.vpp} at pp 1; it cuts each stage of a pipeline into pieces: set {key}.pp to"
            " 2 or more, or vpp=1"
        )


def check_overlap(key: str, optimizer: OptimizerConfig) -> Iterator[str]:
    """One message per problem of the optimizer under `key`."""
    if optimizer.overlap_param_gather and optimizer.overlap_grad_reduce is False:
        yield f"{key}.overlap_param_gather: found true, which needs {key}.overlap_grad_reduce=true, or null"


def _check_product(key: str, parallel: ParallelConfig, samples_per_minibatch: int) -> Iterator[str]:
    total, model_size = parallel.num_processes, parallel.tp * parallel.pp * parallel.cp
    if total % model_size:
        yield (
            f"{key}.num_processes: found {total}, which tp {parallel.tp} x pp {parallel.pp} x cp {parallel.cp}"
            f" = {model_size} does not divide; {_nearest_multiple(total, model_size)} would fit"
        )
        return
    if samples_per_minibatch < parallel.dp:
        yield (
            f"{key}: {parallel.dp} data-parallel ranks share {samples_per_minibatch} samples"
            " (train.samples_per_minibatch); each needs at least one"
        )
    # The experts' layout: etp x ep x expert data parallelism in each pipeline stage.
    stage = total // parallel.pp
    if stage % (parallel.etp * parallel.ep):
        etp = find_nearest_divisor(stage, parallel.etp)
        ep = find_nearest_divisor(stage // etp, parallel.ep)
        yield (
            f"{key}.ep: found {parallel.ep} with etp {parallel.etp}; etp x ep must divide the {stage} processes of a"
            f" pipeline stage; the nearest that do are ep={ep} etp={etp}"
        )


def find_nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` nearest to `wanted`, the smaller of two."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    divisors = [*small, *(number // n for n in small)]
    return min(divisors, key=lambda n: (abs(n - wanted), n))


def _nearest_multiple(number: int, factor: int) -> int:
    """The multiple of `factor` nearest to `number`, the greater of two; at least one of it."""
    return max(1, (2 * number + factor) // (2 * factor)) * factor


def check_compute(config: Config) -> Iterator[str]:
    """One message per contradiction that is visible without the checkpoint and the machine."""
    yield from _check_role("policy", config.policy)
    if needs_critic(config.algo):
        yield from _check_role("critic", config.critic)
    if needs_reference(config.algo) and config.reference.offload is Offload.optimizer:
        yield "reference.offload: found optimizer; the reference has none: all, or null"


def _check_role(role: str, node: TrainedRoleConfig) -> Iterator[str]:
    if node.recompute_num_layers < 1:
        yield f"{role}.recompute_num_layers: found {node.recompute_num_layers}; it must be 1 or more"
    if node.fp8 and node.dtype is not Dtype.bfloat16:
        yield (
            f"{role}.fp8: found {node.fp8.value} with {role}.dtype={node.dtype.value}; FP8 products need"
            f" {role}.dtype=bfloat16"
        )


_UNKNOWN = (
    FunctionRewardConfig,
    HttpRewardConfig,
    ScalarModelRewardConfig,
    EnvironmentRewardConfig,
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


def _find_score_range(config: RewardConfig) -> tuple[float, float] | None:
    if config.wrong != 0:
        return 0.0, 1.0  # every other score is refused
    if isinstance(config, WeightedRewardConfig):
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
