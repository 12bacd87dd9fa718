"""A job's plan: memory of every GPU and node in each phase, bytes of a sync, seconds, and what does not fit."""

import functools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from megarl.algo.registry import needs_critic
from megarl.config.errors import ConfigError
from megarl.config.placement import check_cluster
from megarl.config.schema.algo import needs_full_kl, needs_reference
from megarl.config.schema.roles import (
    CriticConfig,
    Dtype,
    ModelSource,
    ParallelConfig,
    PolicyConfig,
    RandomModelConfig,
    ReferenceConfig,
    Trainable,
    TrainedRoleConfig,
)
from megarl.config.schema.root import Config
from megarl.config.schema.run import SERVERS
from megarl.mcore.spec import (
    StageParameters,
    check_layout,
    check_router_replay,
    read_architecture,
)
from megarl.models.architecture import Architecture
from megarl.models.checkpoint import SPECIAL_TOKENS, default_cache_dir, resolve_checkpoint
from megarl.models.families import build_random_fields, parse_architecture
from megarl.plan.assumptions import GIB, HOST_PROCESS_GIB, SERVER_GIB
from megarl.plan.memory import (
    GpuPlan,
    MicroBatch,
    RoleJob,
    Saving,
    ServerMemory,
    StageMemory,
    compute_saved,
    compute_server_weights,
    estimate_server,
    estimate_stages,
    place_job,
    plan_gpus,
)
from megarl.plan.seconds import Seconds, Transfer, describe_work, estimate_seconds, estimate_transfer
from megarl.sync.pieces import check_serving_layout

PUBLISHED: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text())
"""Fields of config.json by the name on the hub, as in model.path"""
DEFAULT_MODULES = ("core_attn",)
"""Modules that Megatron recomputes under recompute=selective (transformer_config.py, recompute_modules)"""
SAMPLE_BYTES = 64
"""Bytes per token of an iteration in the driver: ids, log-probs, values, advantages, returns and masks"""
FIRST, LAST = (f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))


@dataclass(frozen=True)
class PlannedModels:
    policy: Architecture
    """Also the reference's"""
    critic: Architecture


def find_models(config: Config) -> PlannedModels:
    """The sizes of the models, from their files where they exist locally, else as published; nothing is downloaded.

    Raises ConfigError naming model.path or critic.init.
    """
    if config.model.source is ModelSource.random:
        policy = describe_random(config.model.random)
    elif config.model.source is ModelSource.path:
        policy = find_architecture(str(config.model.path), "model.path")
    else:
        policy = _read(resolve_checkpoint(config.model, default_cache_dir()), "model.source")
    has_own = needs_critic(config.algo) and config.critic.init is not None
    return PlannedModels(policy, find_architecture(str(config.critic.init), "critic.init") if has_own else policy)


def find_architecture(name: str, key: str) -> Architecture:
    """The sizes of a checkpoint directory, a model in the Hugging Face cache, or one of PUBLISHED."""
    directory = Path(name).expanduser()
    if (directory / "config.json").is_file():
        return _read(directory, key)
    cached = find_in_cache(name)
    if cached is not None:
        return _read(cached, key)
    if name in PUBLISHED:
        return parse_architecture(PUBLISHED[name], Path(name))
    raise ConfigError(
        [
            f"{key}: {name!r} found; no config.json is in {directory.absolute()} or, under that name, in the local"
            f" Hugging Face cache, and its sizes are not among those known here: {', '.join(PUBLISHED)}"
        ]
    )


def find_in_cache(name: str) -> Path | None:
    """The directory of a model whose config.json is in the local Hugging Face cache; None where none is."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _read(directory: Path, key: str) -> Architecture:
    try:
        return read_architecture(directory)
    except (OSError, ValueError) as error:
        raise ConfigError([f"{key}: {error}"]) from error


def describe_random(random: RandomModelConfig) -> Architecture:
    """The sizes of model.source=random, whose files need not exist yet."""
    fields = build_random_fields(random, len(random.alphabet) + len(SPECIAL_TOKENS))
    return parse_architecture({"model_type": random.family, **fields}, Path("model.random"))


def build_jobs(config: Config, models: PlannedModels, on_gpu: bool) -> dict[str, RoleJob]:
    """The roles that the algorithm needs, in the order policy, critic, reference.

    Raises ConfigError for a layout that does not divide its model, and for replay of routes that it does not have.
    """
    jobs = {"policy": _build_job(config, "policy", config.policy, models.policy, on_gpu)}
    if needs_critic(config.algo):
        jobs["critic"] = _build_job(config, "critic", config.critic, models.critic, on_gpu)
    if needs_reference(config.algo):
        jobs["reference"] = _build_job(config, "reference", config.reference, models.policy, on_gpu)
    problems = list(check_serving_layout(models.policy, config.rollout.tp)) if config.has_servers else []
    for name, job in jobs.items():
        problems += check_layout(job.arch, job.parallel, f"{name}.parallel", config.model.megatron)
    if config.rollout.router_replay:
        problems += check_router_replay(models.policy)
    if problems:
        raise ConfigError(problems)
    return jobs


def _build_job(
    config: Config, name: str, node: TrainedRoleConfig | ReferenceConfig, arch: Architecture, on_gpu: bool
) -> RoleJob:
    batch, num_microbatches = find_microbatch(config, node.parallel, find_longest(config, is_critic=name == "critic"))
    saving, fp8 = Saving(), False
    if isinstance(node, TrainedRoleConfig):
        fp8 = node.fp8 is not None
        modules = tuple(config.model.megatron.get("recompute_modules") or DEFAULT_MODULES)
        saving = Saving(node.recompute, node.recompute_method, node.recompute_num_layers, modules)
    return RoleJob(
        name=name,
        arch=arch,
        parallel=node.parallel,
        dtype=node.dtype,
        is_trained=isinstance(node, TrainedRoleConfig),
        has_value_head=name == "critic",
        holds_reference=name == "policy" and needs_full_kl(config.algo),
        offload=node.offload,
        saving=saving,
        batch=batch,
        num_microbatches=num_microbatches,
        on_gpu=on_gpu,
        fp8=fp8,
        lora=node.lora if isinstance(node, PolicyConfig) and node.lora.rank else None,
        trainable=node.trainable if isinstance(node, CriticConfig) else Trainable.all,
        caches_fp8=fp8 and not config.model.megatron.get("disable_parameter_transpose_cache"),
    )


def find_longest(config: Config, is_critic: bool = False) -> int:
    """The maximum number of tokens of a sequence; is_critic: of the critic's, with data.critic_prompt."""
    own = config.data.num_critic_tokens if is_critic else 0
    return own + config.data.prompt_length + config.rollout.response_length


def find_microbatch(config: Config, parallel: ParallelConfig, longest: int) -> tuple[MicroBatch, int]:
    """The largest micro-batch that packing makes (mcore/microbatches.py), nearly all of it response tokens, and the
    number of micro-batches per minibatch on a data-parallel rank if every sequence has its maximum length, `longest`.
    """
    train = config.train
    budget = train.tokens_per_microbatch * parallel.cp
    tokens = min(max(budget, longest), ceil(train.num_samples / parallel.dp) * longest)
    share = ceil(train.minibatch_size / parallel.dp)
    number = ceil(share / max(1, budget // longest))
    own = ceil(tokens / parallel.cp)
    return MicroBatch(own, own, longest), number


def check_batches(config: Config, jobs: Mapping[str, RoleJob]) -> list[str]:
    """Problems with dividing an iteration's samples over the ranks of a role, one message each."""
    samples, problems = config.train.minibatch_size, []
    for name, job in jobs.items():
        if job.is_trained and samples < job.parallel.dp:
            problems.append(
                f"{name}.parallel: {job.parallel.dp} data-parallel ranks share {samples} samples"
                " (train.samples_per_minibatch); each needs at least one"
            )
    return problems


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
    left: float
    """Bytes that the fullest GPU has left in its fullest phase; below 0 where it has too few"""
    problems: tuple[str, ...]
    """What does not fit, one message each"""

    @property
    def num_gpus(self) -> int:
        """The number of GPUs that are used."""
        return len({gpu for gpus in self.places.values() for gpu in gpus})

    @property
    def last_gpu(self) -> int:
        return max(gpu for gpus in self.places.values() for gpu in gpus)


def build_plan(config: Config, models: PlannedModels, mean_response: float | None = None) -> JobPlan:
    """The plan of a job on a cluster whose hardware is known.

    mean_response: mean tokens of a response, for seconds; None: as assumed.

    Raises ConfigError for a layout that does not divide its model, and where the GPUs of a node are not counted.
    """
    if config.cluster.gpus_per_node == 0:
        raise ConfigError(["cluster.gpus_per_node: found 0; a plan needs the number of GPUs of a node"])
    jobs = build_jobs(config, models, on_gpu=True)
    stages = {name: estimate_stages(job, count_job(config, job)) for name, job in jobs.items()}
    rollout, places, longest = config.rollout, place_job(config), find_longest(config)
    weights = compute_server_weights(models.policy, rollout.tp, rollout.dtype)
    gpus = plan_gpus(
        *(config, jobs, stages, places),
        lambda free: estimate_server(models.policy, rollout, weights, free, longest),
    )
    servers = [each.server for each in gpus if each.server is not None]
    server = min(servers, key=lambda memory: memory.kv_cache, default=None)
    transfer = estimate_transfer(jobs["policy"], stages["policy"], rollout, weights)
    host = compute_host(config, jobs, stages, places, server.kv_tokens if server else 0)
    problems = (*check_batches(config, jobs), *_find_problems(config, server, longest, gpus, host))
    work = describe_work(config, mean_response)
    seconds = estimate_seconds(config, jobs, stages, server, transfer, work)
    left = config.cluster.hardware.memory_gib * GIB - max(max(each.phases.values()) for each in gpus)
    return JobPlan(jobs, stages, places, gpus, server, transfer, seconds, work.response, host, left, problems)


def count_job(config: Config, job: RoleJob) -> tuple[StageParameters, ...]:
    """The parameters of one rank of each stage, where all layers are alike from Megatron's models of one and of two
    layers. Raises ConfigError for settings that Megatron refuses.
    """
    arch, parallel, megatron = job.arch, job.parallel, dict(config.model.megatron)
    first, last = (megatron.pop(key, None) for key in (FIRST, LAST))
    try:
        if arch.has_unlike_layers or any(key.startswith(("pipeline_model", "account_for")) for key in megatron):
            return _count(arch, astuple(parallel), job.dtype, json.dumps(config.model.megatron), job.has_value_head)
        ranks = parallel.tp * max(1, ceil(parallel.ep * parallel.etp / parallel.tp))
        sizes = (ranks, parallel.tp, parallel.sp, 1, 1, 1, parallel.ep, parallel.etp)
        one, two = (
            _count(replace(arch, num_layers=number), sizes, job.dtype, json.dumps(megatron), job.has_value_head)[0]
            for number in (1, 2)
        )
    except ValueError as error:
        raise ConfigError([f"{job.name}: {error}"]) from error
    dense, experts = two.dense - one.dense, two.experts - one.experts
    rest = one.dense - dense - one.embedding - one.head
    ends = {number: size for number, size in ((0, first), (parallel.pp - 1, last)) if size}
    others = (arch.num_layers - sum(ends.values())) // max(1, parallel.pp - len(ends))
    layers = [ends.get(number, others) for number in range(parallel.pp)]
    if sum(layers) != arch.num_layers or any(size % parallel.vpp for size in layers):
        found = f"stages of {', '.join(map(str, layers))} layers, each in {parallel.vpp} pieces (vpp)"
        raise ConfigError([f"{job.name}.parallel.pp: found {found}; the model has {arch.num_layers} layers"])
    # A tied output layer is a weight of its own on another stage than the embedding.
    head = one.head or (one.embedding if parallel.pp > 1 else 0)
    counts = []
    for number, size in enumerate(layers):
        embedding = one.embedding if number == 0 else 0
        own = (head, rest) if number == parallel.pp - 1 else (0, 0)
        count = size * dense + embedding + sum(own)
        counts.append(StageParameters(size, count, size * experts, embedding, own[0], size * (two.mlp - one.mlp)))
    return tuple(counts)


@functools.cache
def _count(
    arch: Architecture, layout: tuple[int | bool, ...], dtype: Dtype, megatron: str, with_value_head: bool
) -> tuple[StageParameters, ...]:
    # Only now: Megatron takes seconds to import, which a job on unknown hardware need not wait for.
    from megarl.mcore.model import count_stages

    return count_stages(arch, ParallelConfig(*layout), dtype, json.loads(megatron), with_value_head)  # type: ignore[arg-type]


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


def _find_problems(
    config: Config, server: ServerMemory | None, longest: int, gpus: tuple[GpuPlan, ...], host: int
) -> Iterator[str]:
    """Of the GPUs that there are, of the servers, of memory: one problem for each set of processes that does not fit,
    in the phase that needs most.
    """
    yield from (message for message in check_cluster(config) if message.startswith(("rollout.tp:", "cluster:")))
    if server is not None:
        found = f"rollout.sglang.mem_fraction_static: found {server.fraction:g}"
        if server.num_longest < 1:
            yield (
                f"{found}; beside weights of {server.weights / GIB:.1f} GiB it leaves memory for {server.kv_tokens}"
                f" tokens of KV cache on each GPU; one sequence may have {longest}"
            )
        if server.reserve < SERVER_GIB * GIB and config.rollout.kv_cache_tokens is None:
            yield (
                f"{found}, which leaves {server.reserve / GIB:.1f} GiB of a GPU for everything but weights and KV"
                f" cache; CUDA graphs and activations take about {SERVER_GIB:g}"
            )
    limit, seen = config.cluster.hardware.memory_gib, set()
    for plan in gpus:
        phase = max(plan.phases, key=lambda name: plan.phases[name])
        roles = tuple(plan.stages)
        if plan.phases[phase] > int(limit * GIB) and roles not in seen:
            seen.add(roles)
            who = [f"{role} stage {stage}" for role, stage in plan.stages.items()] + [SERVERS] * bool(plan.server)
            taken = f"{phase} takes {plan.phases[phase] / GIB:.1f} GiB of {limit:.1f}"
            yield f"GPU {plan.gpus[0]} ({', '.join(who)}): {taken}"
    has = config.cluster.hardware.host_memory_gib
    if host > has * GIB:
        yield f"the fullest node takes {ceil(host / GIB)} GiB of host memory of {has:g}"
