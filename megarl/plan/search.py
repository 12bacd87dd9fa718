"""Which values of a configuration's keys make its job fit, or faster: the nearest change, and the fastest plans.

The nearest change mends one problem after the other, one key at a time, the least intrusive first. The search tries
placements, layouts, servers, recomputation and micro-batches on the GPUs of the cluster; what the roles compute and
what the servers generate are looked for separately, the fastest first, and joined. Memory is planned as for any job,
and a plan that does not fit is dropped.
"""

import contextlib
import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import ceil
from typing import Any

from megarl.config.checks.config import check_config, check_older_samples, find_nearest_divisor
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.placement import SERVERS, count_nodes, list_contradictions, list_groups, place
from megarl.config.schema.roles import Offload, ParallelConfig, Recompute, RecomputeMethod, TrainedRoleConfig
from megarl.config.schema.root import Config
from megarl.config.schema.run import AUTO, Placement, ServerOffload, Transport
from megarl.config.values import write_value
from megarl.mcore.spec import check_layout
from megarl.models.architecture import Architecture
from megarl.plan.assumptions import GIB, SERVER_GIB
from megarl.plan.job import (
    FIRST,
    LAST,
    JobPlan,
    PlannedModels,
    Problem,
    build_jobs,
    build_plan,
    check_batches,
    count_quickly,
    find_longest,
)
from megarl.plan.memory import add_overhead, estimate_stages, hold
from megarl.plan.seconds import (
    compute_forward,
    compute_offload,
    compute_update,
    count_updates,
    describe_work,
    find_work,
    scores_rollouts,
)
from megarl.sync.pieces import check_serving_layout

MAX_ROUNDS = 4
"""The number of problems that are fixed one after the other"""
LEAST_TOKENS = 1024
"""A micro-batch is not reduced below this many tokens"""
FRACTIONS = (0.2, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.82, 0.84, 0.86, 0.88, 0.9, 0.92, 0.94)
"""rollout.sglang.mem_fraction_static, for a job that does not fit"""
NUM_BEST = 10
NUM_KEPT = 16
"""Ways to compute that are joined with servers, of each division of the GPUs"""
LEAST_LEFT = 4 * GIB
SHARE_LEFT = 1 / 16
"""Memory that each GPU has left, for what a plan has not foreseen: the smaller of LEAST_LEFT and this share of it"""
SEARCHED_FRACTIONS = (0.88, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5, 0.4)
"""rollout.sglang.mem_fraction_static, of which the search takes the largest with enough memory left"""
SHARES = (1, 2, 4)
"""Tokens of a micro-batch, in sequences of full length"""
SIZES = (1, 2, 4, 8, 16)
"""Tensor, pipeline and context parallel sizes"""
EXPERT_SIZES = (1, 2, 4, 8, 16, 32, 64)

Values = Mapping[str, Any]
"""Values by dotted key"""


@dataclass(frozen=True)
class Change:
    overrides: tuple[str, ...]
    """As on the command line"""
    plan: JobPlan
    """The plan of the changed job, which fits"""


def write_overrides(values: Values) -> tuple[str, ...]:
    return tuple(f"{key}={write_value(value)}" for key, value in values.items())


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
    return Change(write_overrides(_join(rounds)), plan)


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
    for key, value in values.items():
        config = _replace(config, key.split("."), value)
    return config


def _replace(node: Any, path: Sequence[str], value: Any) -> Any:
    name, *rest = path
    changed = copy.copy(node)
    new = _replace(_get(node, name), rest, value) if rest else value
    if isinstance(changed, dict):
        changed[name] = new
    else:
        setattr(changed, name, new)
    return changed


def read_value(config: Config, key: str) -> Any:
    """The value of a dotted key; None where it is not set."""
    return reduce(_get, key.split("."), config)


def _get(node: Any, name: str) -> Any:
    return node.get(name) if isinstance(node, dict) else getattr(node, name)


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
        more = ceil(parallel.num_processes * (factor - 1) / cluster.gpus_per_node)
        yield from ({**number, **cut, **_list_nodes(config, cluster.num_nodes + more)} for cut in cuts)


def check_plan(config: Config, models: PlannedModels) -> list[str]:
    """Why the job does not fit, as messages of a ConfigError, the last with a change that would make it fit; else [].

    The check at the start of every job. Memory is planned on clusters whose hardware is known (cluster.hardware);
    elsewhere only batches are checked. There Megatron is imported and its parameters are counted, which takes seconds,
    in a process that is in no process group.
    """
    if config.cluster.hardware.gpu is None:
        return check_batches(config, build_jobs(config, models, on_gpu=False))
    try:
        plan = build_plan(config, models)
    except ConfigError as error:
        return list(error.problems)
    if not plan.problems:
        return []
    change = find_change(config, models, plan)
    advice = "none of the changes that were tried makes it fit"
    if change is not None:
        advice = f"it fits with {' '.join(change.overrides)}"
    return [
        *(problem.message for problem in plan.problems),
        f"cluster.hardware: the job does not fit {config.cluster.hardware.gpu}; {advice};"
        " cluster.hardware.gpu=null starts it without a plan",
    ]


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
    return Change(write_overrides(values), after)


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


@dataclass(frozen=True)
class Layout:
    tp: int
    pp: int
    cp: int
    ep: int
    vpp: int
    ends: int | None
    """Layers of the first and of the last stage, where the stages cannot all have as many"""

    @property
    def num_ranks(self) -> int:
        """Ranks of one replica."""
        return self.tp * self.pp * self.cp

    def build(self, num_processes: int) -> ParallelConfig:
        return ParallelConfig(num_processes, self.tp, self.tp > 1, self.pp, self.vpp, self.cp, self.ep)

    def list_values(self, role: str, num_processes: int) -> Values:
        parallel = self.build(num_processes)
        names = ("num_processes", "tp", "sp", "pp", "vpp", "cp", "ep", "etp")
        return {f"{role}.parallel.{name}": getattr(parallel, name) for name in names}

    def list_model_values(self, config: Config) -> Values:
        """Keys that all roles share; a number of layers that the configuration has and this layout must not is null."""
        given = config.model.megatron
        keys = (FIRST, LAST) if self.ends is not None or given.get(FIRST) or given.get(LAST) else ()
        return {f"model.megatron.{key}": self.ends for key in keys}


def list_layouts(arch: Architecture, num_processes: int, per_node: int) -> Iterator[Layout]:
    """Tensor parallelism within a node."""
    for tp, pp, cp in ((tp, pp, cp) for tp in SIZES for pp in SIZES for cp in SIZES):
        if tp > per_node or num_processes % (tp * pp * cp):
            continue
        ends = find_ends(arch.num_layers, pp)
        for ep in EXPERT_SIZES if arch.experts else (1,):
            for vpp in (1, 2) if pp > 1 and ends is None else (1,):
                layout = Layout(tp, pp, cp, ep, vpp, ends)
                megatron = {} if ends is None else {FIRST: ends, LAST: ends}
                is_whole = num_processes // pp % ep == 0
                if is_whole and not check_layout(arch, layout.build(num_processes), "", megatron):
                    yield layout


def find_ends(num_layers: int, pp: int) -> int | None:
    """Layers of the first and last stage, which also have embedding and output layer: at most as many as the others."""
    if num_layers % pp == 0 or pp < 3:
        return None
    return next((n for n in range(num_layers // pp, 0, -1) if (num_layers - 2 * n) % (pp - 2) == 0), None)


@dataclass(frozen=True)
class Division:
    """Which GPUs compute and which generate."""

    placement: Placement
    trained: int
    """GPUs of the policy, and of the critic"""
    reference: int
    servers: int


@dataclass(frozen=True)
class Way:
    """How the roles compute."""

    values: Values
    seconds: float
    key: tuple[Any, ...]


def search(
    arguments: Sequence[str], models: PlannedModels, mean_response: float | None = None, staleness: int = 0
) -> list[Change]:
    """The fastest plans that fit, each with another placement, layout or servers, the fastest first.

    arguments: of the command line; keys that it sets keep their values. Every plan is that of a job which was loaded
    with the arguments and the plan's overrides. staleness: rollout.max_staleness.
    """
    base = load_config(arguments)
    start: dict[str, Any] = {"rollout.max_staleness": staleness}
    if staleness and any(check_older_samples(base.algo, "")):
        start["algo.mismatch.correction"] = type(base.algo.mismatch.correction)["tis"]
    given = tuple(text.split("=")[0].lstrip("+") for text in arguments if "." in text.split("=")[0] and "=" in text)
    tries = _Tries(base, apply(base, start), given, models, mean_response)
    candidates: dict[tuple[Any, ...], list[tuple[float, Values]]] = {}
    for division in list_divisions(tries.config):
        for way in tries.list_ways(division):
            for values, plan in tries.join_servers(division, way):
                key = (division, way.key, values.get("rollout.tp"))
                candidates.setdefault(key, []).append((plan.seconds.iteration, {**start, **values}))
    best = sorted((min(each, key=lambda pair: pair[0]) for each in candidates.values()), key=lambda pair: pair[0])
    checked = (tries.check(arguments, values) for _, values in best)
    return list(itertools.islice((found for found in checked if found is not None), NUM_BEST))


def compute_reserve(config: Config) -> float:
    """Bytes that a plan leaves of each GPU."""
    return min(LEAST_LEFT, SHARE_LEFT * config.cluster.hardware.memory_gib * GIB)


def list_divisions(config: Config) -> Iterator[Division]:
    """Servers take turns with the roles only where these wait for them, that is without staleness. With rollout.file
    there are none.
    """
    per_node, has_reference = config.cluster.gpus_per_node, "reference" in _list_roles(config)
    total = config.cluster.num_nodes * per_node
    step = max(per_node, total // 16) if total > per_node else 1
    trained = 2 if "critic" in _list_roles(config) else 1
    if not config.has_servers:
        yield Division(Placement.split, total, total, 0)
        for size in range(step, total, step) if trained + has_reference > 1 else ():
            references = {size, step} if has_reference else {0}
            fitting = (reference for reference in references if trained * size + reference <= total)
            yield from (Division(Placement.apart, size, reference, 0) for reference in fitting)
        return
    if config.rollout.max_staleness == 0:
        yield Division(Placement.colocated, total, total, total)
    for size in range(step, total, step):
        yield Division(Placement.split, size, size, total - size)
        for reference in {size, step} if has_reference else {0}:
            servers = total - trained * size - reference
            if servers > 0 and trained + has_reference > 1:
                yield Division(Placement.apart, size, reference, servers)


def _list_roles(config: Config) -> list[str]:
    return [group.name for group in list_groups(config) if group.name != SERVERS]


@dataclass(frozen=True)
class _Tries:
    """What the search tries of one job."""

    base: Config
    """As on the command line"""
    config: Config
    """With what the search always sets"""
    given: tuple[str, ...]
    """Keys that the command line sets, whose values stay"""
    models: PlannedModels
    mean_response: float | None

    def allows(self, values: Values) -> bool:
        return all(
            read_value(self.base, key) == value
            for key, value in values.items()
            if any(key == own or key.startswith(f"{own}.") for own in self.given)
        )

    def check(self, arguments: Sequence[str], values: Values) -> Change | None:
        """The plan of the job that the overrides make; None where a check of the configuration refuses them."""
        changed = {key: value for key, value in values.items() if read_value(self.base, key) != value}
        overrides = write_overrides(changed)
        try:
            config = load_config([*arguments, *overrides])
            if list_contradictions(config):
                return None
            plan = build_plan(config, self.models, self.mean_response)
        except ConfigError:
            return None
        return None if plan.problems else Change(overrides, plan)

    def list_ways(self, division: Division) -> list[Way]:
        """The fastest ways to compute, one for each layout."""
        config, roles = self.config, _list_roles(self.config)
        is_shared = division.placement is not Placement.apart
        offloads: list[Offload | None] = [Offload.all] if division.placement is Placement.colocated else [None]
        if division.placement is Placement.split and len(roles) > 1:
            offloads.append(Offload.all)
        best: dict[tuple[Any, ...], Way] = {}
        for layout in list_layouts(self.models.policy, division.trained, config.cluster.gpus_per_node):
            fixed = {"cluster.placement": division.placement, **layout.list_model_values(config)}
            for name in roles:
                number = division.reference if name == "reference" else division.trained
                fixed |= layout.list_values(name, number)
            if division.reference % layout.num_ranks or not self.allows(fixed):
                continue
            for saving, share, offload in itertools.product(self._list_savings(layout), SHARES, offloads):
                tokens = ceil(share * find_longest(config) / layout.cp)
                values = {**fixed, **saving, "train.tokens_per_microbatch": tokens}
                values |= {f"{name}.offload": offload for name in roles}
                seconds = self._time_roles(apply(config, values), is_shared) if self.allows(values) else None
                key = (layout, offload)
                if seconds is not None and (key not in best or seconds < best[key].seconds):
                    best[key] = Way(values, seconds, key)
        return sorted(best.values(), key=lambda way: way.seconds)[:NUM_KEPT]

    def _list_savings(self, layout: Layout) -> Iterator[dict[str, Any]]:
        """Settings of recomputation, of the policy: none, the MLP, a part of the layers, all of them."""
        roles = [name for name in _list_roles(self.config) if name != "reference"]

        def write(recompute: Recompute, **others: Any) -> dict[str, Any]:
            values = {"recompute": recompute, **others}
            return {f"{role}.{key}": value for role in roles for key, value in values.items()}

        yield write(Recompute.none)
        if self.models.policy.experts is None:
            yield {**write(Recompute.selective), "model.megatron.recompute_modules": ["mlp"]}
        layers = self.models.policy.num_layers // (layout.pp * layout.vpp)
        for part in (4, 2):
            if layers % part == 0:
                number = layers // part
                yield write(Recompute.full, recompute_method=RecomputeMethod.block, recompute_num_layers=number)
        yield write(Recompute.full)

    def _time_roles(self, config: Config, is_shared: bool) -> float | None:
        """Of log-probs, values, update and offloading; None where no memory is left beside what servers keep."""
        cluster, work = config.cluster, describe_work(config, self.mean_response)
        forward, update = [], []
        peaks, held = [], []
        try:
            jobs = build_jobs(config, self.models, on_gpu=True)
            for job in jobs.values():
                if job.is_trained and job.parallel.dp > work.minibatch:
                    return None
                stages = estimate_stages(job, count_quickly(config, job))
                peaks.append(max(add_overhead(stage.peak) for stage in stages))
                held.append(max(add_overhead(hold(stage, job, is_shared)) for stage in stages))
                own = find_work(config, job, work)
                passing = compute_forward(job, stages, own, cluster) if scores_rollouts(config, job) else 0.0
                forward.append(passing + compute_offload(config, job, stages))
                if job.is_trained:
                    update.append(compute_update(job, stages, own, cluster) * count_updates(config, job))
        except ConfigError:
            return None
        needed = max(peaks)
        if is_shared:
            needed = sum(held) + max(peak - least for peak, least in zip(peaks, held, strict=True))
        if cluster.placement is Placement.colocated:
            needed += int(SERVER_GIB * GIB)
        if needed > cluster.hardware.memory_gib * GIB - compute_reserve(config):
            return None
        return sum(forward) + sum(update) if is_shared else max(forward) + max(update)

    def join_servers(self, division: Division, way: Way) -> Iterator[tuple[Values, JobPlan]]:
        """The plans that fit with each size of a server, with the largest KV cache for which there is memory; without
        servers the plan of the roles.
        """
        if division.servers == 0:
            with contextlib.suppress(ConfigError):
                yield from self._plan(way.values)
            return
        is_colocated = division.placement is Placement.colocated
        for tp in (1, 2, 4, 8):
            if tp > self.config.cluster.gpus_per_node or division.servers % tp:
                continue
            if any(check_serving_layout(self.models.policy, tp)):
                continue
            values = {**way.values, "rollout.tp": tp, "rollout.num_servers": division.servers // tp}
            values["rollout.transport"] = Transport.colocated if is_colocated else Transport.split
            values["rollout.offload"] = ServerOffload.all if is_colocated else None
            fractions = ({**values, "rollout.sglang.mem_fraction_static": each} for each in SEARCHED_FRACTIONS)
            with contextlib.suppress(ConfigError):
                plans = (found for complete in fractions if self.allows(complete) for found in self._plan(complete))
                yield from itertools.islice(plans, 1)

    def _plan(self, values: Values) -> Iterator[tuple[Values, JobPlan]]:
        """The plan of these values, where it fits with enough memory left. Raises ConfigError."""
        plan = build_plan(apply(self.config, values), self.models, self.mean_response, count_quickly)
        if not plan.problems and plan.left >= compute_reserve(self.config):
            yield values, plan
