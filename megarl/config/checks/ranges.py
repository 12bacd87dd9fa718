"""The numbers of every group but `algo`: which range each must be in."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from math import inf, isfinite

from megarl.algo.registry import needs_critic
from megarl.config.schema.roles import OptimizerConfig
from megarl.config.schema.root import Config


@dataclass(frozen=True)
class Range:
    low: float
    above: bool = False
    """`low` itself is out of the range."""

    def contains(self, value: float) -> bool:
        return isfinite(value) and (value > self.low if self.above else value >= self.low)

    def __str__(self) -> str:
        if self.low == -inf:
            return "a finite number"
        return f"above {self.low:g}" if self.above else f"{self.low:g} or more"


_POSITIVE, _NOT_NEGATIVE, _ONE_OR_MORE = Range(0, above=True), Range(0), Range(1)

RANGES: dict[str, Range] = {
    "seed": _NOT_NEGATIVE,
    "rollout.num_servers": _ONE_OR_MORE,
    "rollout.tp": _ONE_OR_MORE,
    "rollout.sync_bucket_mb": _ONE_OR_MORE,
    "rollout.max_staleness": _NOT_NEGATIVE,
    "rollout.max_running_requests": _ONE_OR_MORE,
    "rollout.num_threads": _ONE_OR_MORE,
    "rollout.startup_deadline_s": _POSITIVE,
    "rollout.request_deadline_s": _POSITIVE,
    "rollout.sync_deadline_s": _POSITIVE,
    "rollout.max_probe_logprob_gap": _POSITIVE,
    "rollout.max_server_restarts": _NOT_NEGATIVE,
    "train.max_minutes": _POSITIVE,
    "train.stop_at_heldout_reward": Range(-inf),
    "critic.updates_per_policy_update": _ONE_OR_MORE,
    "cluster.cpu_threads_per_worker": _ONE_OR_MORE,
    "cluster.object_store_mb": _ONE_OR_MORE,
    "cluster.worker_start_deadline_s": _POSITIVE,
    "cluster.call_deadline_s": _POSITIVE,
    "cluster.shutdown_deadline_s": _POSITIVE,
    "checkpoint.save_every": _ONE_OR_MORE,
    "checkpoint.keep_last": _ONE_OR_MORE,
    "checkpoint.keep_best": _NOT_NEGATIVE,
    "checkpoint.stop_deadline_s": _POSITIVE,
    "checkpoint.max_restarts": _NOT_NEGATIVE,
    "logger.num_logged_samples": _NOT_NEGATIVE,
}
"""The range of each key; a value that is null is not looked at."""

OPTIMIZER_RANGES: dict[str, Range] = {
    "lr": _NOT_NEGATIVE,
    "warmup_steps": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "eps": _POSITIVE,
    "clip_grad": _NOT_NEGATIVE,
}


def check_ranges(config: Config) -> Iterator[str]:
    """One message per number out of its range; NaN and infinities are in none."""
    yield from _find_outside(config, RANGES, "")
    if not (isfinite(config.reward.wrong) and config.reward.wrong < 1):
        yield f"reward.wrong: found {config.reward.wrong}; it must be a finite number below 1, a right answer's reward"
    yield from check_optimizer("policy.optimizer", config.policy.optimizer, config.train.num_optimizer_steps)
    if needs_critic(config.algo):
        steps = config.train.num_optimizer_steps * config.critic.updates_per_policy_update
        yield from check_optimizer("critic.optimizer", config.critic.optimizer, steps)


def check_optimizer(key: str, optimizer: OptimizerConfig, steps_per_iteration: int) -> Iterator[str]:
    """One message per problem of the optimizer under `key`, which takes so many steps in each iteration."""
    yield from _find_outside(optimizer, OPTIMIZER_RANGES, f"{key}.")
    if not 0 <= optimizer.min_lr <= max(optimizer.lr, 0):
        yield f"{key}.min_lr: found {optimizer.min_lr}; it must be between 0 and lr ({optimizer.lr})"
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(optimizer, name) < 1:
            yield f"{key}.{name}: found {getattr(optimizer, name)}; it must be in [0, 1)"
    yield from _check_decay(key, optimizer, optimizer.count_decay_steps(steps_per_iteration))


def _check_decay(key: str, optimizer: OptimizerConfig, steps: int | None) -> Iterator[str]:
    decay, warmup = optimizer.decay.value, optimizer.warmup_steps
    if decay == "constant":
        if optimizer.decay_steps is not None:
            yield f"{key}.decay_steps: has no effect under decay=constant; set decay=linear or cosine, or leave it out"
    elif steps is None:
        yield f"{key}.decay_steps: found null; decay={decay} needs a number of steps, or {key}.decay_iterations"
    elif steps <= max(warmup, 0):
        found = f"decay_steps: found {optimizer.decay_steps}"
        if optimizer.decay_steps is None:
            found = f"decay_iterations: found {optimizer.decay_iterations}, which is {steps} optimizer steps"
        yield f"{key}.{found}; it must be above {key}.warmup_steps ({warmup}), which it includes"


def _find_outside(node: object, ranges: dict[str, Range], prefix: str) -> Iterator[str]:
    for key, allowed in ranges.items():
        value = reduce(getattr, key.split("."), node)
        if value is not None and not (isinstance(value, int | float) and allowed.contains(value)):
            yield f"{prefix}{key}: found {value}; it must be {allowed}"
