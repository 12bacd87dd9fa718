"""A job's plan: memory of every GPU and node in each phase, bytes of a sync, seconds, and what does not fit."""

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from math import ceil

from megarl.config.errors import ConfigError
from megarl.config.placement import SERVERS, find_server_offload, take_turns
from megarl.config.schema.roles import Dtype, ParallelConfig
from megarl.config.schema.rollout import RolloutConfig
from megarl.config.schema.root import Config
from megarl.mcore.model.architecture import Architecture
from megarl.mcore.model.parameter_count import count_stages
from megarl.mcore.worker_spec import StageParameters
from megarl.plan.assumptions import GIB, HOST_PROCESS_GIB, SERVER_GIB
from megarl.plan.gpus import GpuKind, Sharing, compute_free, compute_phases, count_gpus, list_kinds, place_job
from megarl.plan.jobs import PlannedModels, build_jobs, check_batches, find_longest
from megarl.plan.roles import RoleJob, StageMemory, compute_saved, estimate_stages
from megarl.plan.seconds import Seconds, describe_work, estimate_seconds
from megarl.plan.serving import ServerMemory, compute_server_weights, estimate_server
from megarl.plan.transfer import Transfer, estimate_transfer

SAMPLE_BYTES = 64
"""Bytes per token of an iteration in the driver: ids, log-probs, values, advantages, returns and masks"""

Counting = Callable[[Config, RoleJob], tuple[StageParameters, ...]]


@dataclass(frozen=True)
class Problem:
    where: str
    """The part that does not fit: gpus, a role, servers, host or batches"""
    message: str


@dataclass(frozen=True)
class GpuPlan:
    kind: GpuKind
    phases: Mapping[str, int]
    """Bytes, by PHASES"""


@dataclass(frozen=True)
class JobPlan:
    jobs: Mapping[str, RoleJob]
    stages: Mapping[str, tuple[StageMemory, ...]]
    places: Mapping[str, tuple[int, ...]]
    """The GPU of every rank of each role and of the servers"""
    gpus: tuple[GpuPlan, ...]
    server: ServerMemory | None
    """The server rank with the least free memory; None with rollout.file, without servers"""
    transfer: Transfer
    seconds: Seconds
    mean_response: float
    """Tokens, as the seconds take it"""
    host_bytes: int
    """Host memory of the fullest node"""
    problems: tuple[Problem, ...]

    @property
    def num_gpus(self) -> int:
        """The number of GPUs that are used."""
        return count_gpus(self.places)

    @property
    def last_gpu(self) -> int:
        return max(gpu for gpus in self.places.values() for gpu in gpus)


def build_plan(
    config: Config, models: PlannedModels, mean_response: float | None = None, count: Counting | None = None
) -> JobPlan:
    """The plan of a job on a cluster whose hardware is known.

    mean_response: mean tokens of a response, for seconds; None: as assumed. count: as `count_job`.

    Raises ConfigError for a layout that does not divide its model, and where the GPUs of a node are not counted.
    """
    if config.cluster.gpus_per_node == 0:
        raise ConfigError(["cluster.gpus_per_node: found 0; a plan needs the number of GPUs of a node"])
    jobs = build_jobs(config, models, on_gpu=True)
    stages = {name: estimate_stages(job, (count or count_job)(config, job)) for name, job in jobs.items()}
    rollout, places = config.rollout, place_job(config)
    kinds = list_kinds(places, jobs)
    gpu_bytes, longest = int(config.cluster.hardware.memory_gib * GIB), find_longest(config)
    weights = _compute_server_weights(models.policy, rollout.tp, rollout.dtype)
    servers = {
        kind: estimate_server(models.policy, rollout, weights, compute_free(kind, stages, gpu_bytes), longest)
        for kind in kinds
        if kind.has_server
    }
    bucket = rollout.sync_bucket_mb << 20
    sharing = Sharing(take_turns(config), find_server_offload(config))
    gpus = tuple(
        GpuPlan(kind, compute_phases(kind, jobs, stages, servers.get(kind), bucket, sharing)) for kind in kinds
    )
    server = min(servers.values(), key=lambda memory: memory.kv_cache, default=None)
    transfer = estimate_transfer(jobs["policy"], stages["policy"], rollout, weights)
    host = compute_host(config, jobs, stages, places, server.kv_tokens if server else 0)
    problems = (
        *(Problem("batches", message) for message in check_batches(config, jobs)),
        *_check_gpus(config, jobs, places),
        *(_check_server(config, server, longest) if server else ()),
        *_check_memory(gpus, gpu_bytes),
        *_check_host(config, host),
    )
    work = describe_work(config, mean_response)
    seconds = estimate_seconds(config, jobs, stages, server, transfer, work)
    return JobPlan(jobs, stages, places, gpus, server, transfer, seconds, work.response, host, problems)


def count_job(config: Config, job: RoleJob) -> tuple[StageParameters, ...]:
    """The parameters of one rank of each stage. Raises ConfigError for settings that Megatron refuses."""
    megatron = json.dumps(config.model.megatron, sort_keys=True)
    try:
        return _count(job.arch, astuple(job.parallel), job.dtype, megatron, job.has_value_head)
    except ValueError as error:
        raise ConfigError([f"{job.name}: {error}"]) from error


@functools.cache
def _count(
    arch: Architecture, layout: tuple[int | bool, ...], dtype: Dtype, megatron: str, with_value_head: bool
) -> tuple[StageParameters, ...]:
    return count_stages(arch, ParallelConfig(*layout), dtype, json.loads(megatron), with_value_head)  # type: ignore[arg-type]


@functools.cache
def _compute_server_weights(arch: Architecture, tp: int, dtype: Dtype) -> int:
    return compute_server_weights(arch, RolloutConfig(tp=tp, dtype=dtype))


def compute_host(
    config: Config,
    jobs: Mapping[str, RoleJob],
    stages: Mapping[str, tuple[StageMemory, ...]],
    places: Mapping[str, Sequence[int]],
    kv_tokens: int,
) -> int:
    """Host memory of the fullest node in bytes.

    It has processes, Ray's object store, what is offloaded, the copy that a checkpoint makes before it is written
    (on the ranks that write), and on the first node an iteration's samples. With rollout.router_replay the
    experts of a token are 4 bytes each beside a server's cache of `kv_tokens` (SGLang's state_capturer/base.py), and
    one in a sample and one in the policy's sequences.
    """
    per_node = config.cluster.gpus_per_node
    process = int(HOST_PROCESS_GIB * GIB)
    nodes: Counter[int] = Counter()
    arch = jobs["policy"].arch
    routed = arch.num_layers * arch.experts.top_k if config.rollout.router_replay and arch.experts else 0
    for gpu in places[SERVERS]:
        nodes[gpu // per_node] += process + 4 * routed * kv_tokens
    for name, job in jobs.items():
        per_stage = job.parallel.num_processes // job.parallel.pp
        for rank, gpu in enumerate(places[name]):
            memory = stages[name][rank // per_stage]
            saves = job.is_trained and config.checkpoint.save_every
            saved = compute_saved(job, memory.parameters, rank % per_stage) if saves else 0
            nodes[gpu // per_node] += process + memory.offloaded + saved
    critic_ids = 8 * find_longest(config, is_critic=True) if "critic" in jobs and config.data.num_critic_tokens else 0
    nodes[0] += config.train.num_samples * (find_longest(config) * (SAMPLE_BYTES + 2 * routed) + critic_ids)
    return max(nodes.values()) + (config.cluster.object_store_mb << 20)


def _check_gpus(config: Config, jobs: Mapping[str, RoleJob], places: Mapping[str, Sequence[int]]) -> Iterator[Problem]:
    cluster, rollout = config.cluster, config.rollout
    if places[SERVERS] and rollout.tp > cluster.gpus_per_node:
        yield Problem(
            "servers",
            f"rollout.tp: found {rollout.tp}; a server is on one node, which has {cluster.gpus_per_node} GPUs",
        )
    nodes = 1 + max(gpu for gpus in places.values() for gpu in gpus) // cluster.gpus_per_node
    if nodes > cluster.num_nodes:
        parts = [f"{name} {job.parallel.num_processes}" for name, job in jobs.items()]
        parts += [f"servers {rollout.num_servers} x {rollout.tp}"] if places[SERVERS] else []
        yield Problem(
            "gpus",
            f"cluster.num_nodes: the job asks for {count_gpus(places)} GPUs ({', '.join(parts)}; cluster.placement="
            f"{cluster.placement.value}), so {nodes} nodes of {cluster.gpus_per_node}; the cluster has"
            f" {cluster.num_nodes} x {cluster.gpus_per_node} = {cluster.num_nodes * cluster.gpus_per_node} GPUs",
        )


def _check_server(config: Config, server: ServerMemory, longest: int) -> Iterator[Problem]:
    key = "rollout.sglang.mem_fraction_static"
    if server.num_longest < 1:
        yield Problem(
            "servers",
            f"{key}: found {server.fraction:g}; beside weights of {server.weights / GIB:.1f} GiB it leaves memory for"
            f" {server.kv_tokens} tokens of KV cache on each GPU; one sequence may have {longest}",
        )
    if server.reserve < SERVER_GIB * GIB and config.rollout.kv_cache_tokens is None:
        yield Problem(
            "servers",
            f"{key}: found {server.fraction:g}, which leaves {server.reserve / GIB:.1f} GiB of a GPU for everything but"
            f" weights and KV cache; CUDA graphs and activations take about {SERVER_GIB:g}",
        )


def _check_memory(gpus: tuple[GpuPlan, ...], gpu_bytes: int) -> Iterator[Problem]:
    """One problem for each set of processes that does not fit, in the phase that needs most."""
    seen = set()
    for plan in gpus:
        phase = max(plan.phases, key=lambda name: plan.phases[name])
        roles = tuple(tenant.role for tenant in plan.kind.tenants)
        if plan.phases[phase] <= gpu_bytes or roles in seen:
            continue
        seen.add(roles)
        who = [f"{tenant.role} stage {tenant.stage}" for tenant in plan.kind.tenants]
        who += [SERVERS] if plan.kind.has_server else []
        yield Problem(
            roles[0] if roles else SERVERS,
            f"GPU {plan.kind.gpus[0]} ({', '.join(who)}): {phase} takes {plan.phases[phase] / GIB:.1f} GiB of"
            f" {gpu_bytes / GIB:.1f}",
        )


def _check_host(config: Config, host: int) -> Iterator[Problem]:
    has = config.cluster.hardware.host_memory_gib
    if host > has * GIB:
        yield Problem("host", f"the fullest node takes {ceil(host / GIB)} GiB of host memory of {has:g}")
