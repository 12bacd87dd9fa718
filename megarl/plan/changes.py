"""The nearest change that makes a job fit: one key at a time, the least intrusive first."""

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from math import ceil
from typing import Any

from megarl.config.checks.config import check_config
from megarl.config.checks.parallel import find_nearest_divisor
from megarl.config.errors import ConfigError
from megarl.config.placement import count_nodes, list_contradictions, list_groups, place
from megarl.config.schema.cluster import AUTO, Placement
from megarl.config.schema.roles import Offload, Recompute, TrainedRoleConfig
from megarl.config.schema.rollout import Transport
from megarl.config.schema.root import Config
from megarl.config.values import write_value
from megarl.plan.assumptions import GIB
from megarl.plan.estimate import JobPlan, Problem, build_plan
from megarl.plan.jobs import PlannedModels

MAX_ROUNDS = 4
"""The number of problems that are fixed one after the other"""
LEAST_TOKENS = 1024
"""A micro-batch is not reduced below this many tokens"""
FRACTIONS = (0.2, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.82, 0.84, 0.86, 0.88, 0.9, 0.92, 0.94)

Values = Mapping[str, Any]
"""Values by dotted key"""


@dataclass(frozen=True)
class Change:
    overrides: tuple[str, ...]
    """As on the command line"""
    plan: JobPlan
    """The plan of the changed job, which fits"""


def find_change(config: Config, models: PlannedModels, plan: JobPlan) -> Change | None:
    """The overrides with which the job fits; None where no change that is tried here helps."""
    start, rounds = config, list[Values]()
    for _ in range(MAX_ROUNDS):
        if not plan.problems:
            break
        found = _mend(config, models, plan, plan.problems[0])
        if found is None:
            return None
        added, config, plan = found
        rounds.append(added)
    return None if plan.problems else _prune(start, models, rounds, plan)


def _prune(config: Config, models: PlannedModels, rounds: list[Values], plan: JobPlan) -> Change:
    """The change without rounds that a later one has made superfluous. plan: of the job with all rounds."""
    known = set(list_contradictions(config))
    for each in list(rounds):
        fewer = [other for other in rounds if other is not each]
        after = _try(apply(config, _join(fewer)), models, known) if fewer else None
        if after is not None and not after.problems:
            rounds, plan = fewer, after
    return Change(tuple(f"{key}={write_value(value)}" for key, value in _join(rounds).items()), plan)


def _join(rounds: list[Values]) -> Values:
    return {key: value for values in rounds for key, value in values.items()}


def _mend(
    config: Config, models: PlannedModels, plan: JobPlan, problem: Problem
) -> tuple[Values, Config, JobPlan] | None:
    """The first candidate that fixes this problem and causes no new one."""
    before = {other.where for other in plan.problems}
    known = set(list_contradictions(config))
    for values in list_candidates(config, plan, problem):
        changed = apply(config, values)
        after = _try(changed, models, known)
        if after is None:
            continue
        left = {other.where for other in after.problems}
        if len(after.problems) < len(plan.problems) and left <= before:
            return values, changed, after
    return None


def _try(config: Config, models: PlannedModels, known: set[str]) -> JobPlan | None:
    """The plan of a changed job; None where its keys contradict each other, unless that was known before."""
    if check_config(config) or not known.issuperset(list_contradictions(config)):
        return None
    try:
        return build_plan(config, models)
    except ConfigError:
        return None


def apply(config: Config, values: Values) -> Config:
    """A copy of the configuration with these values; what they do not touch is shared with it."""
    changed = copy.copy(config)
    for key, value in values.items():
        *path, name = key.split(".")
        node: Any = changed
        for part in path:
            child = copy.copy(_get(node, part))
            _set(node, part, child)
            node = child
        _set(node, name, value)
    return changed


def read_value(config: Config, key: str) -> Any:
    """The value of a dotted key; None where it is not set."""
    return reduce(_get, key.split("."), config)


def _get(node: Any, name: str) -> Any:
    return node.get(name) if isinstance(node, dict) else getattr(node, name)


def _set(node: Any, name: str, value: Any) -> None:
    if isinstance(node, dict):
        node[name] = value
    else:
        setattr(node, name, value)


def list_candidates(config: Config, plan: JobPlan, problem: Problem) -> Iterator[Values]:
    """The candidates for one problem, nearest first. Some contradict other keys; the caller skips those."""
    if problem.where == "gpus":
        yield from _list_gpu_changes(config, plan)
    elif problem.where == "host":
        yield from _list_host_changes(config, plan)
    elif problem.where == "servers":
        yield from _list_server_changes(config)
        yield from _list_less_shared(config)
    elif problem.where in plan.jobs:
        yield from _list_role_changes(config, plan, problem.where)


def _list_gpu_changes(config: Config, plan: JobPlan) -> Iterator[Values]:
    cluster = config.cluster
    yield from ({"rollout.num_servers": number} for number in range(config.rollout.num_servers - 1, 0, -1))
    if cluster.placement is Placement.apart:
        offloads = {f"{name}.offload": Offload.all for name in plan.jobs}
        # Where policy and servers share GPUs, NCCL cannot join them.
        memory = {"rollout.transport": Transport.colocated} if config.rollout.transport is Transport.split else {}
        together: dict[str, Any] = {"cluster.placement": Placement.colocated, **memory}
        for values in ({"cluster.placement": Placement.split}, together):
            yield values
            yield {**values, **offloads}
        yield {**together, **offloads, "rollout.sglang.mem_fraction_static": 0.5}
    yield _list_nodes(config, 1 + plan.last_gpu // cluster.gpus_per_node)


def _list_nodes(config: Config, number: int) -> dict[str, Any]:
    """The values for this number of nodes, and those that a job of several nodes needs."""
    values: dict[str, Any] = {"cluster.num_nodes": number}
    if config.cluster.num_nodes == 1 and config.cluster.listen_host != AUTO:
        values["cluster.listen_host"] = AUTO
    return values


def _list_host_changes(config: Config, plan: JobPlan) -> Iterator[Values]:
    store = config.cluster.object_store_mb
    excess = plan.host_bytes / GIB - config.cluster.hardware.host_memory_gib
    if store - excess * 1024 >= 1024:
        yield {"cluster.object_store_mb": int(store - ceil(excess) * 1024)}
    for name in plan.jobs:
        yield {f"{name}.offload": None}


def _list_server_changes(config: Config) -> Iterator[Values]:
    rollout = config.rollout
    now = float(rollout.sglang.get("mem_fraction_static") or 0.87)
    for fraction in sorted(FRACTIONS, key=lambda other: abs(other - now)):
        yield {"rollout.sglang.mem_fraction_static": fraction}
    for factor in (2, 4, 8):
        if rollout.num_servers % factor == 0:
            yield {"rollout.tp": rollout.tp * factor, "rollout.num_servers": rollout.num_servers // factor}
        yield {"rollout.tp": rollout.tp * factor}
    per_node = config.cluster.gpus_per_node
    if per_node and per_node % rollout.tp:
        yield {"rollout.tp": find_nearest_divisor(per_node, rollout.tp)}


def _list_role_changes(config: Config, plan: JobPlan, name: str) -> Iterator[Values]:
    """Changes of the role, then of those that share its GPUs, then two of them at once."""
    is_shared = config.cluster.placement is not Placement.apart
    names = [name, *(other for other in plan.jobs if is_shared and other != name)]
    single = [values for other in names for values in _list_own_changes(config, other, is_shared)]
    yield from single
    less_shared = list(_list_less_shared(config))
    yield from (values for values in less_shared if "cluster.num_nodes" not in values)
    for first, second in itertools.combinations(single, 2):
        if not first.keys() & second.keys():
            yield {**first, **second}
    yield from (values for values in less_shared if "cluster.num_nodes" in values)
    for other in names:
        yield from _list_larger(config, other)


def _list_own_changes(config: Config, name: str, is_shared: bool) -> Iterator[Values]:
    """Changes of the role that keep its GPUs."""
    node, parallel = getattr(config, name), getattr(config, name).parallel
    if isinstance(node, TrainedRoleConfig) and node.recompute is not Recompute.full:
        yield {f"{name}.recompute": Recompute.full}
    tokens = config.train.tokens_per_microbatch // 2
    while tokens >= LEAST_TOKENS:
        yield {"train.tokens_per_microbatch": tokens}
        tokens //= 2
    if is_shared and node.offload is not Offload.all:
        yield {f"{name}.offload": Offload.all}
    if is_shared and "mem_fraction_static" in config.rollout.sglang:
        now = float(config.rollout.sglang["mem_fraction_static"])
        for fraction in reversed([other for other in FRACTIONS if other < now]):
            yield {"rollout.sglang.mem_fraction_static": fraction}
    for axis in ("cp", "tp", "pp"):
        wider: dict[str, Any] = {f"{name}.parallel.{axis}": getattr(parallel, axis) * 2}
        if axis == "tp" and not parallel.sp:
            wider[f"{name}.parallel.sp"] = True
        yield wider


def _list_less_shared(config: Config) -> Iterator[Values]:
    """Placements in which fewer processes share a GPU, nearest first, on as many nodes as needed."""
    order = [Placement.colocated, Placement.split, Placement.apart]
    for placement in order[order.index(config.cluster.placement) + 1 :]:
        values: dict[str, Any] = {"cluster.placement": placement}
        needed = count_nodes(place(apply(config, values).cluster, list_groups(config)))
        more = _list_nodes(config, needed) if needed > config.cluster.num_nodes else {}
        yield {**values, **more}


def _list_larger(config: Config, name: str) -> Iterator[Values]:
    """Changes with more GPUs for the role: more replicas, then more model parallelism; more nodes where needed."""
    parallel = getattr(config, name).parallel
    for factor in (2, 4, 8):
        number = {f"{name}.parallel.num_processes": parallel.num_processes * factor}
        cuts = [{}, {f"{name}.parallel.tp": parallel.tp * factor, f"{name}.parallel.sp": True}]
        yield from ({**number, **cut} for cut in cuts)
        cluster = config.cluster
        if cluster.gpus_per_node:
            more = ceil(parallel.num_processes * (factor - 1) / cluster.gpus_per_node)
            yield from ({**number, **cut, **_list_nodes(config, cluster.num_nodes + more)} for cut in cuts)


def describe_idle(config: Config, models: PlannedModels, plan: JobPlan) -> Iterator[str]:
    """Of a job that fits and leaves half of the GPUs idle or more: that it does, and what would mend it."""
    cluster = config.cluster
    there, used = cluster.num_nodes * cluster.gpus_per_node, plan.num_gpus
    if 2 * used > there:
        return
    parts = []
    fuller = find_fuller(config, models, plan)
    if fuller is not None:
        parts.append(
            f"with {' '.join(fuller.overrides)} {fuller.plan.num_gpus} GPUs work, and an iteration takes"
            f" {fuller.plan.seconds.iteration:,.0f} s instead of {plan.seconds.iteration:,.0f} s"
        )
    nodes = 1 + plan.last_gpu // cluster.gpus_per_node
    if nodes < cluster.num_nodes:
        parts.append(f"cluster.num_nodes={nodes} is enough for it as it is")
    yield f"{there - used} of {there} GPUs are idle: " + ("; ".join(parts) or "nothing that was tried uses them")


def find_fuller(config: Config, models: PlannedModels, plan: JobPlan) -> Change | None:
    """The fastest of the changes that put more than half of the GPUs to work, where it is faster than the job is."""
    there = config.cluster.num_nodes * config.cluster.gpus_per_node
    known, found = set(list_contradictions(config)), list[tuple[Values, JobPlan]]()
    for values in _list_fuller(config, plan, there // plan.num_gpus):
        after = _try(apply(config, values), models, known)
        is_better = after is not None and not after.problems and after.seconds.iteration < plan.seconds.iteration
        if after is not None and is_better and there < 2 * after.num_gpus:
            found.append((values, after))
    if not found:
        return None
    values, after = min(found, key=lambda each: each[1].seconds.iteration)
    return Change(tuple(f"{key}={write_value(value)}" for key, value in values.items()), after)


def _list_fuller(config: Config, plan: JobPlan, most: int) -> Iterator[Values]:
    """The servers beside the roles in place of among them, and more replicas of both; most: by this factor."""
    beside: dict[str, Any] = {"cluster.placement": Placement.split, "rollout.transport": Transport.split}
    placements: list[dict[str, Any]] = [{}]
    if config.cluster.placement is Placement.colocated and plan.server is not None:
        placements.append(beside)
    for placement in placements:
        for factor in range(most, 0, -1):
            values = {
                f"{name}.parallel.num_processes": job.parallel.num_processes * factor for name, job in plan.jobs.items()
            }
            if plan.server is not None:
                values["rollout.num_servers"] = config.rollout.num_servers * factor
            yield {**placement, **(values if factor > 1 else {})}
