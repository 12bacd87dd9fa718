"""The fastest plans of a job on the GPUs of its cluster: placements, layouts, servers, recomputation, micro-batches.

What the roles compute and what the servers generate are looked for separately, the fastest first, and joined: memory
is planned as for any job, and a plan that does not fit is dropped.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from megarl.config.checks.algo import check_older_samples
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.placement import SERVERS, list_contradictions, list_groups
from megarl.config.schema.cluster import Placement
from megarl.config.schema.roles import Offload, Recompute, RecomputeMethod
from megarl.config.schema.rollout import ServerOffload, Transport
from megarl.config.schema.root import Config
from megarl.config.values import write_value
from megarl.plan.assumptions import GIB, SERVER_GIB
from megarl.plan.changes import Values, apply, read_value
from megarl.plan.estimate import JobPlan, build_plan
from megarl.plan.gpus import add_overhead, hold
from megarl.plan.jobs import PlannedModels, build_jobs, find_longest
from megarl.plan.layouts import Layout, count_quickly, list_layouts
from megarl.plan.passes import compute_forward, compute_update
from megarl.plan.roles import estimate_stages
from megarl.plan.seconds import compute_offload, count_updates, describe_work, find_work, scores_rollouts
from megarl.sync.serving_pieces import check_serving_layout

NUM_BEST = 10
NUM_KEPT = 16
"""Ways to compute that are joined with servers, of each division of the GPUs"""
LEAST_LEFT = 4 * GIB
SHARE_LEFT = 1 / 16
"""Memory that each GPU has left, for what a plan has not foreseen: the smaller of LEAST_LEFT and this share of it"""
FRACTIONS = (0.88, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5, 0.4)
"""rollout.sglang.mem_fraction_static"""
SHARES = (1, 2, 4)
"""Tokens of a micro-batch, in sequences of full length"""


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


@dataclass(frozen=True)
class Found:
    overrides: tuple[str, ...]
    """As on the command line, beside the arguments of the search"""
    plan: JobPlan
    left: float
    """Bytes that the fullest GPU has left"""

    @property
    def seconds(self) -> float:
        return self.plan.seconds.iteration


def search(
    arguments: Sequence[str], models: PlannedModels, mean_response: float | None = None, staleness: int = 0
) -> list[Found]:
    """The fastest plans that fit, each with another placement, layout or servers, the fastest first.

    arguments: of the command line; keys that it sets keep their values. Every plan is that of a job which was loaded
    with the arguments and the plan's overrides. staleness: rollout.max_staleness.
    """
    base = load_config(arguments)
    given = _Given(base, arguments)
    start: dict[str, Any] = {"rollout.max_staleness": staleness}
    if staleness and any(check_older_samples(base.algo, "")):
        start["algo.mismatch.correction"] = type(base.algo.mismatch.correction)["tis"]
    config = apply(base, start)
    candidates: dict[tuple[Any, ...], list[tuple[float, Values]]] = {}
    for division in list_divisions(config):
        for way in list_ways(config, models, division, mean_response, given.allows):
            for values, plan in join_servers(config, models, division, way, mean_response, given.allows):
                key = (division, way.key, values.get("rollout.tp"))
                found = (plan.seconds.iteration, {**start, **values})
                candidates.setdefault(key, []).append(found)
    best = sorted((min(each, key=lambda pair: pair[0]) for each in candidates.values()), key=lambda pair: pair[0])
    checked = (_check(base, models, arguments, values, mean_response) for _, values in best)
    return list(itertools.islice((found for found in checked if found is not None), NUM_BEST))


class _Given:
    """The keys that the command line sets."""

    def __init__(self, config: Config, arguments: Sequence[str]):
        self._config = config
        self._keys = [text.split("=")[0].lstrip("+") for text in arguments if "=" in text and "." in text.split("=")[0]]

    def allows(self, values: Values) -> bool:
        return all(
            read_value(self._config, key) == value
            for key, value in values.items()
            if any(key == own or key.startswith(f"{own}.") for own in self._keys)
        )


def _check(
    base: Config, models: PlannedModels, arguments: Sequence[str], values: Values, mean_response: float | None
) -> Found | None:
    """The plan of the job that the overrides make; None where a check of the configuration refuses them."""
    changed = {key: value for key, value in values.items() if read_value(base, key) != value}
    overrides = tuple(f"{key}={write_value(value)}" for key, value in changed.items())
    try:
        config = load_config([*arguments, *overrides])
        if list_contradictions(config):
            return None
        plan = build_plan(config, models, mean_response)
    except ConfigError:
        return None
    if plan.problems:
        return None
    return Found(overrides, plan, find_left(config, plan))


def find_left(config: Config, plan: JobPlan) -> float:
    """Bytes that the fullest GPU has left in its fullest phase."""
    return config.cluster.hardware.memory_gib * GIB - max(max(gpus.phases.values()) for gpus in plan.gpus)


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
    if config.rollout.file is not None:
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


def list_ways(
    config: Config,
    models: PlannedModels,
    division: Division,
    mean_response: float | None,
    allows: Callable[[Values], bool],
) -> list[Way]:
    """The fastest ways to compute, one for each layout."""
    roles, is_shared = _list_roles(config), division.placement is not Placement.apart
    offloads: list[Offload | None] = [Offload.all] if division.placement is Placement.colocated else [None]
    if division.placement is Placement.split and len(roles) > 1:
        offloads.append(Offload.all)
    best: dict[tuple[Any, ...], Way] = {}
    for layout in list_layouts(models.policy, division.trained, config.cluster.gpus_per_node):
        fixed = {"cluster.placement": division.placement, **layout.list_model_values(config)}
        for name in roles:
            number = division.reference if name == "reference" else division.trained
            fixed |= layout.list_values(name, number)
        if division.reference % layout.num_ranks or not allows(fixed):
            continue
        for saving, share, offload in itertools.product(_list_savings(config, models, layout), SHARES, offloads):
            tokens = ceil(share * find_longest(config) / layout.cp)
            values = {**fixed, **saving, "train.tokens_per_microbatch": tokens}
            values |= {f"{name}.offload": offload for name in roles}
            if not allows(values):
                continue
            seconds = _time_roles(apply(config, values), models, mean_response, is_shared)
            key = (layout, offload)
            if seconds is not None and (key not in best or seconds < best[key].seconds):
                best[key] = Way(values, seconds, key)
    return sorted(best.values(), key=lambda way: way.seconds)[:NUM_KEPT]


def _list_savings(config: Config, models: PlannedModels, layout: Layout) -> Iterator[dict[str, Any]]:
    """Settings of recomputation, of the policy: none, the MLP, a part of the layers, all of them."""
    has_critic = "critic" in _list_roles(config)

    def write(recompute: Recompute, **others: Any) -> dict[str, Any]:
        values = {"recompute": recompute, **others}
        roles = ("policy", "critic") if has_critic else ("policy",)
        return {f"{role}.{key}": value for role in roles for key, value in values.items()}

    yield write(Recompute.none)
    if models.policy.experts is None:
        yield {**write(Recompute.selective), "model.megatron.recompute_modules": ["mlp"]}
    layers = models.policy.num_layers // (layout.pp * layout.vpp)
    for part in (4, 2):
        if layers % part == 0:
            number = layers // part
            yield write(Recompute.full, recompute_method=RecomputeMethod.block, recompute_num_layers=number)
    yield write(Recompute.full)


def _time_roles(config: Config, models: PlannedModels, mean_response: float | None, is_shared: bool) -> float | None:
    """Seconds of log-probs, values, update and offloading; None where no memory is left beside what servers keep."""
    cluster, work = config.cluster, describe_work(config, mean_response)
    forward, update = [], []
    peaks, held = [], []
    try:
        jobs = build_jobs(config, models, on_gpu=True)
        for job in jobs.values():
            if job.is_trained and job.parallel.dp > work.minibatch:
                return None
            stages = estimate_stages(job, count_quickly(config, job))
            peaks.append(max(add_overhead(stage.peak) for stage in stages))
            held.append(max(add_overhead(hold(stage, job, is_shared)) for stage in stages))
            place = (cluster.hardware, cluster.gpus_per_node)
            own = find_work(config, job, work)
            passing = compute_forward(job, stages, own, *place) if scores_rollouts(config, job) else 0.0
            forward.append(passing + compute_offload(config, job, stages))
            if job.is_trained:
                update.append(compute_update(job, stages, own, *place) * count_updates(config, job))
    except ConfigError:
        return None
    needed = sum(held) + max(peak - least for peak, least in zip(peaks, held, strict=True)) if is_shared else max(peaks)
    if cluster.placement is Placement.colocated:
        needed += int(SERVER_GIB * GIB)
    if needed > cluster.hardware.memory_gib * GIB - compute_reserve(config):
        return None
    return sum(forward) + sum(update) if is_shared else max(forward) + max(update)


def join_servers(
    config: Config,
    models: PlannedModels,
    division: Division,
    way: Way,
    mean_response: float | None,
    allows: Callable[[Values], bool],
) -> Iterator[tuple[Values, JobPlan]]:
    """The plans that fit with each size of a server, with the largest KV cache for which there is memory; without
    servers the plan of the roles.
    """
    if division.servers == 0:
        with contextlib.suppress(ConfigError):
            plan = build_plan(apply(config, way.values), models, mean_response, count_quickly)
            if not plan.problems and find_left(config, plan) >= compute_reserve(config):
                yield way.values, plan
        return
    per_node = config.cluster.gpus_per_node
    is_colocated = division.placement is Placement.colocated
    for tp in (tp for tp in (1, 2, 4, 8) if tp <= per_node and division.servers % tp == 0):
        if any(check_serving_layout(models.policy, tp)):
            continue
        values = {**way.values, "rollout.tp": tp, "rollout.num_servers": division.servers // tp}
        values["rollout.transport"] = Transport.colocated if is_colocated else Transport.split
        values["rollout.offload"] = ServerOffload.all if is_colocated else None
        for fraction in FRACTIONS:
            complete = {**values, "rollout.sglang.mem_fraction_static": fraction}
            if not allows(complete):
                continue
            try:
                plan = build_plan(apply(config, complete), models, mean_response, count_quickly)
            except ConfigError:
                break
            if not plan.problems and find_left(config, plan) >= compute_reserve(config):
                yield complete, plan
                break
