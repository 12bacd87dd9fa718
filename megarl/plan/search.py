"""Which values of a configuration's keys make its job fit, or faster: changes are neighbours of the present point.

A job that does not fit goes to the first neighbour that fits, or to the one that lacks least. The search goes, from
each division of the cluster's GPUs, to the fastest neighbour until none is faster.
"""

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from megarl.config.checks import check_config, check_older_samples
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.overrides import write_value
from megarl.config.placement import list_contradictions, list_groups
from megarl.config.schema.roles import Offload, Recompute
from megarl.config.schema.root import Config
from megarl.config.schema.run import AUTO, SERVERS, Placement, ServerOffload, Transport
from megarl.plan.assumptions import GIB
from megarl.plan.job import (
    FIRST,
    LAST,
    JobPlan,
    PlannedModels,
    build_jobs,
    build_plan,
    check_batches,
    find_longest,
)

MAX_CHANGES = 4
"""Changes that are made one after the other for a job that does not fit"""
FRACTIONS = (0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.82, 0.84, 0.86, 0.88, 0.9, 0.92, 0.94)
"""rollout.sglang.mem_fraction_static"""
FRACTION, MODULES = "rollout.sglang.mem_fraction_static", "model.megatron.recompute_modules"
SIZES = (1, 2, 4, 8)
SHAPE = ("cluster.placement", ".parallel.", "rollout.tp")
"""Parts of the keys that make two plans of a search different"""
NUM_BEST = 10
NO_JOB = (float("inf"),)
LEAST_LEFT, SHARE_LEFT = 4 * GIB, 1 / 16
"""Memory that a plan of the search leaves of each GPU, for what it has not foreseen: the smaller one of these"""

Values = dict[str, Any]
"""Values by dotted key"""


@dataclass(frozen=True)
class Change:
    overrides: tuple[str, ...]
    """As on the command line"""
    plan: JobPlan
    """The plan of the changed job, which fits"""


def check_plan(config: Config, models: PlannedModels) -> list[str]:
    """Why the job does not fit, as messages of a ConfigError, the last with a change that would make it fit; else [].

    The check at the start of every job. Memory is planned on clusters whose hardware is known (cluster.hardware);
    elsewhere only batches are checked.
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
    advice = f"it fits with {' '.join(change.overrides)}" if change else "none of the changes that were tried helps"
    return [
        *plan.problems,
        f"cluster.hardware: the job does not fit {config.cluster.hardware.gpu}; {advice};"
        " cluster.hardware.gpu=null starts it without a plan",
    ]


def find_change(config: Config, models: PlannedModels, plan: JobPlan) -> Change | None:
    """The overrides with which the job fits, plan being its plan; None where no change that is tried here helps."""
    made: Values = {}
    known = set(list_contradictions(config))
    for _ in range(MAX_CHANGES):
        near = (made | values for values in _list_changes(apply(config, made), plan))
        better: Values | None = None
        for values in near if plan.problems else ():
            after = _try(apply(config, values), models, known)
            if after is not None and _lack(after) < _lack(plan):
                better, plan = values, after
                if not plan.problems:
                    break
        made = better or made
    for key in list(made):
        # A later change may have made an earlier one superfluous.
        fewer = {other: value for other, value in made.items() if other != key}
        after = _try(apply(config, fewer), models, known)
        if after is not None and not after.problems:
            made, plan = fewer, after
    return None if plan.problems else Change(_write(config, made), plan)


def _lack(plan: JobPlan) -> tuple[int, float, float]:
    """How far a plan is from one that fits."""
    return (len(plan.problems), max(0.0, -plan.left), plan.host_bytes) if plan.problems else (0, 0.0, 0.0)


def _write(config: Config, values: Values) -> tuple[str, ...]:
    """The overrides of values that are not the configuration's own."""
    return tuple(f"{key}={write_value(each)}" for key, each in values.items() if read_value(config, key) != each)


def _try(config: Config, models: PlannedModels, known: set[str], mean_response: float | None = None) -> JobPlan | None:
    """The plan of a changed job; None where its keys contradict each other, unless that was known before."""
    if check_config(config) or not known.issuperset(list_contradictions(config)):
        return None
    try:
        return build_plan(config, models, mean_response)
    except ConfigError:
        return None


def apply(config: Config, values: Values) -> Config:
    """A copy of the configuration with these values; what they do not touch is shared with it."""
    for key, value in values.items():
        config = _replace(config, key.split("."), value)
    return config


def _replace(node: Any, path: Sequence[str], value: Any) -> Any:
    changed, (name, *rest) = copy.copy(node), path
    new = _replace(_get(node, name), rest, value) if rest else value
    if isinstance(changed, dict):
        changed[name] = new
    else:
        setattr(changed, name, new)
    return changed


def _get(node: Any, name: str) -> Any:
    return node.get(name) if isinstance(node, dict) else getattr(node, name)


def read_value(config: Config, key: str) -> Any:
    """The value of a dotted key; None where it is not set."""
    node: Any = config
    for name in key.split("."):
        node = _get(node, name)
    return node


def _list_changes(config: Config, plan: JobPlan) -> Iterator[Values]:
    """The neighbours of a job that does not fit, the least intrusive first. Some contradict other keys."""
    rollout, cluster, roles = config.rollout, config.cluster, list(plan.jobs)
    yield from ({"rollout.num_servers": number} for number in range(rollout.num_servers - 1, 0, -1))
    store = cluster.object_store_mb - ceil(plan.host_bytes / GIB - cluster.hardware.host_memory_gib) * 1024
    if 1024 <= store < cluster.object_store_mb:
        yield {"cluster.object_store_mb": store}
    yield from (values for role in roles for values in _list_steps(config, [role]))
    for factor in SIZES[1:]:
        yield {"rollout.tp": rollout.tp * factor, "rollout.num_servers": max(1, rollout.num_servers // factor)}
    offloads = {f"{role}.offload": Offload.all for role in roles}
    together = {"cluster.placement": Placement.colocated, "rollout.transport": Transport.colocated, **offloads}
    placements: list[Values] = [{"cluster.placement": Placement.split}, {"cluster.placement": Placement.apart}]
    yield from (*placements, placements[0] | offloads, together, {**together, FRACTION: 0.5})
    yield from _list_steps(config, roles)
    yield _list_nodes(config, 1 + plan.last_gpu // cluster.gpus_per_node)
    yield from (values | _list_nodes(config, 2 * cluster.num_nodes) for values in placements)
    for group, factor in itertools.product([*([role] for role in roles), roles], SIZES[1:]):
        parallel = getattr(config, group[0]).parallel
        more = ceil(parallel.num_processes * (factor - 1) / cluster.gpus_per_node)
        for tp in (parallel.tp, parallel.tp * factor):
            larger = _size(group, num_processes=parallel.num_processes * factor, tp=tp)
            yield from (larger, larger | _list_nodes(config, cluster.num_nodes + more))


def _list_nodes(config: Config, number: int) -> Values:
    """The values for this number of nodes, and those that a job of several nodes needs."""
    return {"cluster.num_nodes": number} | ({"cluster.listen_host": AUTO} if config.cluster.num_nodes == 1 else {})


def _list_steps(config: Config, roles: Sequence[str]) -> Iterator[Values]:
    """The neighbours of a job with other settings and layouts of these roles, on the same GPUs."""
    parallel, trained = getattr(config, roles[0]).parallel, [role for role in roles if role != "reference"]
    kinds: list[Values] = []
    for kind in (Recompute.full, Recompute.selective, Recompute.none) if trained else ():
        modules = {MODULES: ["mlp"]} if kind is Recompute.selective else {}
        kinds.append({f"{role}.recompute": kind for role in trained} | modules)
    length = ceil(find_longest(config) / parallel.cp)
    sizes: list[Values] = [{"train.tokens_per_microbatch": number * length} for number in (8, 4, 2, 1)]
    yield from (*kinds, *sizes, *(kind | size for kind, size in itertools.product(kinds, sizes)))
    yield from ({f"{role}.offload": offload for role in roles} for offload in (Offload.all, None))
    now = float(config.rollout.sglang.get("mem_fraction_static") or 0.87)
    yield from ({FRACTION: fraction} for fraction in sorted(FRACTIONS, key=lambda other: abs(other - now)))
    present = {axis: getattr(parallel, axis) for axis in ("cp", "tp", "pp", "ep", "vpp")}
    larger = {axis: size * 2 for axis, size in present.items() if axis != "vpp" or size == 1}
    smaller = {axis: size // 2 for axis, size in present.items() if size > 1}
    yield from (_size(roles, **{axis: size}) for axis, size in [*larger.items(), *smaller.items()])
    for one, other in itertools.product(larger, smaller):
        if one != other:
            yield _size(roles, **{one: larger[one], other: smaller[other]})


def _size(roles: Sequence[str], **sizes: int) -> Values:
    """The values that give the roles other sizes of their layouts."""
    sequence = {"sp": sizes["tp"] > 1} if "tp" in sizes else {}
    return {f"{role}.parallel.{name}": size for role in roles for name, size in (sizes | sequence).items()}


def search(
    arguments: Sequence[str], models: PlannedModels, mean_response: float | None = None, staleness: int = 0
) -> list[Change]:
    """The fastest plans that fit, each with another placement, layout or servers, the fastest first.

    arguments: of the command line; keys that it sets keep their values. Every plan is that of a job which was loaded
    with the arguments and the plan's overrides. staleness: rollout.max_staleness.
    """
    base = load_config(arguments)
    start: Values = {"rollout.max_staleness": staleness}
    if staleness and any(check_older_samples(base.algo, "")):
        start["algo.mismatch.correction"] = type(base.algo.mismatch.correction)["tis"]
    given = tuple(text.split("=")[0].lstrip("+") for text in arguments if "." in text.split("=")[0] and "=" in text)
    config, reserve = apply(base, start), min(LEAST_LEFT, SHARE_LEFT * base.cluster.hardware.memory_gib * GIB)
    scores: dict[str, tuple[float, ...]] = {}
    best: dict[str, tuple[tuple[float, ...], Values]] = {}

    def score(values: Values) -> tuple[float, ...]:
        """What it lacks, then its seconds; infinite where it is no job, or changes what the command line sets."""
        name = _name(values)
        if name not in scores:
            scores[name] = NO_JOB
            set_before = [key for key in values if any(f"{key}.".startswith(f"{own}.") for own in given)]
            if all(read_value(base, key) == values[key] for key in set_before):
                plan = _try(apply(config, values), models, set(), mean_response)
                if plan is not None:
                    lacks = len(plan.problems), max(0.0, reserve - plan.left)
                    scores[name] = found = (*lacks, plan.seconds.iteration)
                    shape = _name(values, SHAPE)
                    if lacks == (0, 0.0) and (shape not in best or found < best[shape][0]):
                        best[shape] = found, values
        return scores[name]

    roles = [group.name for group in list_groups(config) if group.name != SERVERS]
    as_it_is: list[Values] = [{}]
    for layouts in (as_it_is, *list_layouts(config, models, roles)):
        fastest = min(layouts, key=score)
        present: Values | None = None
        while score(fastest) != NO_JOB and fastest != present:
            present = fastest
            near = (_end_stages(config, models, present | step) for step in _list_steps(apply(config, present), roles))
            fastest = min((present, *near), key=score)
    fastest_first = sorted(best.values(), key=lambda each: each[0])
    found: dict[frozenset[str], Change] = {}
    for _, values in fastest_first:
        change = _load(arguments, base, start | values, models, mean_response)
        if change is not None:
            # What the command line asks for may be reached from another point, too.
            found.setdefault(frozenset(change.overrides), change)
        if len(found) == NUM_BEST:
            break
    return list(found.values())


def _name(values: Values, keys: Sequence[str] = ("",)) -> str:
    """The values of the keys that have one of these parts."""
    return str(sorted((key, str(value)) for key, value in values.items() if any(part in key for part in keys)))


def _end_stages(config: Config, models: PlannedModels, values: Values) -> Values:
    """With the layers of the first and last stage, which also have embedding and output layer, where the stages cannot
    all have as many: at most as many as the others.
    """
    pp, num_layers = values.get("policy.parallel.pp", config.policy.parallel.pp), models.policy.num_layers
    ends = [n for n in range(num_layers // pp, 0, -1) if pp > 2 and (num_layers - 2 * n) % (pp - 2) == 0]
    number = ends[0] if ends and num_layers % pp else None
    if number is None and not config.model.megatron.get(FIRST):
        return values
    return values | {f"model.megatron.{key}": number for key in (FIRST, LAST)}


def _load(
    arguments: Sequence[str], base: Config, values: Values, models: PlannedModels, mean_response: float | None
) -> Change | None:
    """The plan of the job that the overrides make; None where a check of the configuration refuses them."""
    if values.get("policy.recompute") is not Recompute.selective:
        values = {key: value for key, value in values.items() if key != MODULES}
    overrides = _write(base, values)
    try:
        config = load_config([*arguments, *overrides])
        plan = build_plan(config, models, mean_response)
    except ConfigError:
        return None
    return None if plan.problems or list_contradictions(config) else Change(overrides, plan)


def list_layouts(config: Config, models: PlannedModels, roles: Sequence[str]) -> Iterator[list[Values]]:
    """Where the search begins: for each division of all GPUs (placements, how many each role has, how many generate)
    simple layouts of the roles and sizes of the servers.

    Servers take turns with the roles only where these wait for them, that is without staleness. With rollout.file
    there are none.
    """
    total, has_servers = config.cluster.num_nodes * config.cluster.gpus_per_node, config.has_servers
    step = max(config.cluster.gpus_per_node, total // 16) if total > config.cluster.gpus_per_node else 1
    divisions = [(Placement.colocated, total, total)] if not has_servers or config.rollout.max_staleness == 0 else []
    for size in range(step, total, step):
        divisions.append((Placement.split, size, total - size))
        if len(roles) > 1 and total - len(roles) * size >= has_servers:
            divisions.append((Placement.apart, size, total - len(roles) * size))
    for placement, num_processes, servers in divisions:
        shares = placement is Placement.colocated
        values: Values = {"cluster.placement": placement}
        values |= {f"{role}.offload": Offload.all if shares else None for role in roles}
        if has_servers:
            values["rollout.transport"] = Transport.colocated if shares else Transport.split
            values["rollout.offload"] = ServerOffload.all if shares else None
        found: list[Values] = []
        for tp, ep, size in itertools.product(SIZES, (config.policy.parallel.ep, 1), SIZES if has_servers else (1,)):
            layout = values | _size(roles, num_processes=num_processes, tp=tp, pp=1, vpp=1, cp=1, ep=ep)
            if has_servers:
                layout |= {"rollout.tp": size, "rollout.num_servers": max(1, servers // size)}
            found.append(_end_stages(config, models, layout))
        yield found
