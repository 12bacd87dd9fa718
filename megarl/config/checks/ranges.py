"""The range that each number must be in (those of `algo` are in algo.py), and what a text may have."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import reduce
from math import inf, isfinite
from typing import Any

from megarl.algo.registry import needs_critic
from megarl.config.schema.roles import ModelSource, OptimizerConfig
from megarl.config.schema.root import Config
from megarl.config.schema.task import (
    EnvironmentRewardConfig,
    JudgeRewardConfig,
    LengthRewardConfig,
    LetterCountRewardConfig,
    MultiTurnEnvironmentConfig,
    NumericRewardConfig,
    ProcessRewardConfig,
    ReasoningGymDataConfig,
    ReasoningGymRewardConfig,
    RewardConfig,
    ScalarModelRewardConfig,
    ServerRewardConfig,
    ToolsEnvironmentConfig,
    WeightedRewardConfig,
)


@dataclass(frozen=True)
class Range:
    low: float
    above: bool = False
    """`low` itself is out of the range."""
    high: float = inf
    why: str = ""
    """Where the bounds come from; empty where nobody would ask."""

    def contains(self, value: float) -> bool:
        return isfinite(value) and value <= self.high and (value > self.low if self.above else value >= self.low)

    def __str__(self) -> str:
        if self.low == -inf:
            return "a finite number"
        low = f"above {self.low:g}" if self.above else f"{self.low:g} or more"
        high = "" if self.high == inf else f" and at most {int(self.high)}"
        return f"{low}{high}{f' ({self.why})' if self.why else ''}"


YEAR_S = 31_536_000
MAX_STALENESS = 100
_POSITIVE, _NOT_NEGATIVE, _ONE_OR_MORE = Range(0, above=True), Range(0), Range(1)
SEED = Range(0, high=2**32 - 1, why="SGLang gives it to numpy, which takes 32 bits")
_DEADLINE = Range(1, high=YEAR_S, why="seconds; a busy machine answers no call in less, and clocks end before infinity")
_START = Range(10, high=YEAR_S, why="seconds; a process that is well imports torch for as long")
_THREADS = Range(1, high=1024, why="more than any node has cores")
_PASSES = Range(1, high=1000, why="an iteration ends after them only")
_PROCESSES = Range(1, high=100_000, why="each is a process")

RANGES: dict[str, Range] = {
    "seed": SEED,
    "data.critic_prompt_length": Range(1, high=2**24, why="tokens"),
    "rollout.temperature": Range(
        0.01, high=100, why="training needs a sampled distribution; the evaluations of a training are greedy anyway"
    ),
    "rollout.num_servers": _PROCESSES,
    "rollout.tp": Range(1, high=1024, why="a server is on one node"),
    "rollout.sync_bucket_mb": Range(1, high=16384, why="MiB, of which each process holds two"),
    "rollout.max_staleness": Range(0, high=MAX_STALENESS, why="so many iterations of responses wait in memory"),
    "rollout.max_running_requests": Range(1, high=65536, why="SGLang reserves a row of positions for each"),
    "rollout.kv_cache_tokens": Range(1, high=2**31 - 1, why="SGLang counts them in 32 bits"),
    "rollout.num_threads": _THREADS,
    "rollout.startup_deadline_s": _START,
    "rollout.request_deadline_s": _DEADLINE,
    "rollout.sync_deadline_s": _DEADLINE,
    "rollout.max_probe_logprob_gap": _POSITIVE,
    "rollout.max_server_restarts": _NOT_NEGATIVE,
    "train.epochs_per_iteration": _PASSES,
    "train.max_minutes": _POSITIVE,
    "train.stop_at_heldout_reward": Range(-inf),
    "critic.updates_per_policy_update": _PASSES,
    "policy.frozen_iterations": _NOT_NEGATIVE,
    "policy.lora.rank": Range(0, high=4096),
    "policy.lora.alpha": _POSITIVE,
    "cluster.num_nodes": Range(1, high=100_000),
    "cluster.gpus_per_node": Range(0, high=1024),
    "cluster.cpu_threads_per_worker": _THREADS,
    "cluster.object_store_mb": Range(75, high=2**24, why="MiB; Ray takes no less, and no node has as much memory"),
    "cluster.worker_start_deadline_s": _START,
    "cluster.call_deadline_s": _DEADLINE,
    "cluster.shutdown_deadline_s": _DEADLINE,
    "cluster.nodes_deadline_s": _DEADLINE,
    "cluster.ray_deadline_s": _START,
    "checkpoint.save_every": _ONE_OR_MORE,
    "checkpoint.keep_last": _ONE_OR_MORE,
    "checkpoint.keep_best": _NOT_NEGATIVE,
    "checkpoint.stop_deadline_s": _DEADLINE,
    "checkpoint.max_restarts": _NOT_NEGATIVE,
    "logger.num_logged_samples": _NOT_NEGATIVE,
    "logger.num_token_records": _NOT_NEGATIVE,
    "logger.token_record_kb": _ONE_OR_MORE,
    "evaluate.num_samples": Range(1, high=65536, why="responses per problem"),
    "evaluate.num_problems": _ONE_OR_MORE,
}
"""The range of each key that every configuration has; a value that is null is not looked at."""

RANDOM_MODEL_RANGES: dict[str, Range] = {
    "num_layers": Range(1, high=1000),
    "hidden_size": Range(1, high=65536),
    "ffn_size": Range(1, high=2**20),
    "num_heads": Range(1, high=4096),
    "num_kv_heads": Range(1, high=4096),
    "max_length": Range(2, high=2**24, why="SGLang reserves a row of as many positions for each request"),
    "num_experts": Range(1, high=4096),
    "experts_per_token": Range(1, high=4096),
    "init_std": Range(0, above=True),
    "seed": Range(0, high=2**63 - 1, why="torch's generator takes no more"),
}

_SCORING = Range(0.01, high=3600, why="seconds; starting to compare two expressions takes a hundredth")
OPTION_RANGES: dict[type, dict[str, Range]] = {
    ReasoningGymDataConfig: {
        "size": Range(1, high=10**6, why="all are made at the start"),
        "num_heldout": Range(1, high=10**6, why="all are made at the start"),
    },
    MultiTurnEnvironmentConfig: {
        "max_turns": Range(1, high=100_000),
        "turn_length": Range(1, high=2**24),
        "step_deadline_s": Range(0.01, high=86_400),
    },
    RewardConfig: {"max_failed_frac": Range(0, high=1)},
    ToolsEnvironmentConfig: {
        "num_processes": Range(1, high=1024, why="each is a process of the driver's machine"),
        "call_timeout_s": Range(0.01, high=86_400),
        "memory_gb": Range(0.01, high=2**20),
        "max_calls": Range(1, high=100_000),
        "result_length": Range(1, high=2**24),
        "call_reward": Range(-inf),
    },
    LetterCountRewardConfig: {"tolerance": Range(1), "falloff": Range(1, above=True)},
    ServerRewardConfig: {
        "timeout_s": Range(0.01, high=86_400, why="seconds"),
        "max_retries": Range(0, high=100),
        "max_concurrency": Range(1, high=100_000, why="each is a connection"),
    },
    JudgeRewardConfig: {
        "max_score": Range(1, high=10**6),
        "max_tokens": Range(1, high=2**24),
        "correct_at": Range(-inf),
    },
    ScalarModelRewardConfig: {"scale": Range(-inf), "offset": Range(-inf), "correct_at": Range(-inf)},
    WeightedRewardConfig: {"correct_at": Range(-inf)},
    ProcessRewardConfig: {
        "num_workers": Range(1, high=1024, why="each is a process"),
        "timeout_s": _SCORING,
        "memory_gb": Range(0.01, high=2**20, why="GiB"),
    },
    NumericRewardConfig: {"tolerance": _NOT_NEGATIVE, "relative_tolerance": _NOT_NEGATIVE},
    LengthRewardConfig: {
        "min_length": _NOT_NEGATIVE,
        "max_length": _NOT_NEGATIVE,
        "falloff": _NOT_NEGATIVE,
    },
    ReasoningGymRewardConfig: {"correct_at": Range(-inf)},
    EnvironmentRewardConfig: {"correct_at": Range(-inf)},
}
"""The ranges of the options of `data` and `reward`, by their schema."""

OPTIMIZER_RANGES: dict[str, Range] = {
    "lr": _NOT_NEGATIVE,
    "warmup_steps": _NOT_NEGATIVE,
    "warmup_ratio": Range(0, high=1),
    "weight_decay": _NOT_NEGATIVE,
    "eps": _POSITIVE,
    "clip_grad": _NOT_NEGATIVE,
}


def check_ranges(config: Config) -> Iterator[str]:
    """One message per number out of its range; NaN and infinities are in none."""
    yield from _find_outside(config, RANGES, "")
    if not (isfinite(config.reward.wrong) and config.reward.wrong < 1):
        yield f"reward.wrong: found {config.reward.wrong}; it must be a finite number below 1, a right answer's reward"
    if config.model.source is ModelSource.random:
        yield from _find_outside(config.model.random, RANDOM_MODEL_RANGES, "model.random.")
    for prefix, node in (
        ("data.", config.data),
        ("environment.", config.environment),
        ("reward.", config.reward),
    ):
        yield from check_options(node, prefix)
    num_iterations = config.train.num_iterations
    yield from check_optimizer(
        "policy.optimizer", config.policy.optimizer, config.train.num_optimizer_steps, num_iterations
    )
    if needs_critic(config.algo):
        steps = config.train.num_optimizer_steps * config.critic.updates_per_policy_update
        yield from check_optimizer("critic.optimizer", config.critic.optimizer, steps, num_iterations)


def check_options(node: object, prefix: str) -> Iterator[str]:
    """One message per number out of its range of a kind of `data`, `environment` or `reward`."""
    for schema in type(node).__mro__:
        yield from _find_outside(node, OPTION_RANGES.get(schema, {}), prefix)


def check_optimizer(
    key: str, optimizer: OptimizerConfig, steps_per_iteration: int, num_iterations: int
) -> Iterator[str]:
    """One message per problem of the optimizer under `key`, which takes so many steps in each iteration."""
    yield from _find_outside(optimizer, OPTIMIZER_RANGES, f"{key}.")
    if not 0 <= optimizer.min_lr <= max(optimizer.lr, 0):
        yield f"{key}.min_lr: found {optimizer.min_lr}; it must be between 0 and lr ({optimizer.lr})"
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(optimizer, name) < 1:
            yield f"{key}.{name}: found {getattr(optimizer, name)}; it must be in [0, 1)"
    yield from _check_decay(key, optimizer, steps_per_iteration, num_iterations)


def _check_decay(key: str, optimizer: OptimizerConfig, steps_per_iteration: int, num_iterations: int) -> Iterator[str]:
    warmup = optimizer.count_warmup_steps(steps_per_iteration, num_iterations)
    steps = optimizer.count_decay_steps(steps_per_iteration, num_iterations)
    if steps is None:
        if optimizer.decay_steps is not None:
            yield f"{key}.decay_steps: has no effect under decay=constant; set decay=linear or cosine, or leave it out"
    elif steps <= max(warmup, 0):
        found = f"decay_steps: found {optimizer.decay_steps}"
        if optimizer.decay_steps is None:
            found = f"decay_iterations: found {optimizer.decay_iterations}, which is {steps} optimizer steps"
        given = "warmup_steps" if optimizer.warmup_ratio is None else f"warmup_ratio={optimizer.warmup_ratio:g}"
        yield f"{key}.{found}; it must be above {key}.{given} ({warmup}), which it includes"


def _find_outside(node: object, ranges: dict[str, Range], prefix: str) -> Iterator[str]:
    for key, allowed in ranges.items():
        value = reduce(getattr, key.split("."), node)
        if value is not None and not (isinstance(value, int | float) and allowed.contains(value)):
            yield f"{prefix}{key}: found {value}; it must be {allowed}"


PROSE = ("data.system", "data.instruction", "data.response_prefix", "data.critic_prompt", "reward.rubric")
"""Keys whose text is shown to the model; it may be empty and have lines."""
CHECKED_ELSEWHERE = ("model.path", "model.random.alphabet")
IN_FOLDER_NAMES = ("algo.name", "model.name")
"""Keys that the name of a run's folder is made of"""


def check_texts(config: Config) -> Iterator[str]:
    """One message per text that is empty or has control characters, or that cannot be part of a folder's name."""
    for key, value in _list_texts(config, ""):
        if key in PROSE or key in CHECKED_ELSEWHERE:
            continue
        if not value.strip():
            yield f"{key}: found {value!r}; it must not be empty (null or leaving it out means the default)"
        elif not value.isprintable():
            yield f"{key}: found {value!r}; it must be one line of text"
        elif key in IN_FOLDER_NAMES and not re.fullmatch(r"[\w.+-]+", value):
            yield f"{key}: found {value!r}; it is a part of the run's folder: letters, digits and _ . + - only"


def _list_texts(node: Any, prefix: str) -> Iterator[tuple[str, str]]:
    for field in fields(node):
        value = getattr(node, field.name)
        if is_dataclass(value):
            yield from _list_texts(value, f"{prefix}{field.name}.")
        elif isinstance(value, str):
            yield f"{prefix}{field.name}", value
