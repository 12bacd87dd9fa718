"""A job's plan: memory of every GPU and node in each phase, bytes of a sync, seconds, and what does not fit.

Changes of a job are neighbours of the present point. One that does not fit goes to the first that fits, or to the one
that lacks least; the search goes, from each division of the cluster's GPUs, to the fastest until none is faster.
"""

import copy
import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from megarl.algo.objective import needs_critic
from megarl.config.checks import check_config, check_older_samples
from megarl.config.errors import ConfigError
from megarl.config.load import Loaded, list_typed, load_config
from megarl.config.overrides import write_value
from megarl.config.placement import check_cluster, list_contradictions, list_groups
from megarl.config.schema import roles as schema
from megarl.config.schema.algo import needs_full_kl, needs_reference
from megarl.config.schema.root import AUTO, SERVERS, Config, Placement, ServerOffload, Transport
from megarl.mcore.spec import StageParameters, check_layout, check_router_replay, choose_recomputed, read_architecture
from megarl.models.architecture import Architecture
from megarl.models.checkpoint import SPECIAL_TOKENS, default_cache_dir, resolve_checkpoint
from megarl.models.families import build_random_fields, parse_architecture
from megarl.plan import memory as m
from megarl.plan.seconds import Seconds, Transfer, describe_work, estimate_seconds, estimate_transfer
from megarl.sync.pieces import check_serving_layout

SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings", "tie_word_embeddings"),
)
QWEN2 = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1e6}
QWEN3 = {**QWEN2, "model_type": "qwen3", "head_dim": 128}
LLAMA3_ROPE = {
    **{"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"},
    "original_max_position_embeddings": 8192,
}
LLAMA3 = {"model_type": "llama", "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE}


def _publish(family: Mapping[str, Any], *sizes: int, **others: Any) -> dict[str, Any]:
    return {**family, **dict(zip(SIZES, sizes, strict=True)), **others}


PUBLISHED = {
    "Qwen/Qwen2.5-32B": _publish(QWEN2, 5120, 27648, 64, 40, 8, 152064, 131072, False, rms_norm_eps=1e-05),
    "Qwen/Qwen2.5-7B": _publish(QWEN2, 3584, 18944, 28, 28, 4, 152064, 131072, False),
    "Qwen/Qwen2-7B-Instruct": _publish(QWEN2, 3584, 18944, 28, 28, 4, 152064, 32768, False),
    "Qwen/Qwen2.5-0.5B-Instruct": _publish(QWEN2, 896, 4864, 24, 14, 2, 151936, 32768, True),
    "Qwen/Qwen3-0.6B": _publish(QWEN3, 1024, 3072, 28, 16, 8, 151936, 40960, True),
    "Qwen/Qwen3-1.7B": _publish(QWEN3, 2048, 6144, 28, 16, 8, 151936, 40960, True),
    "Qwen/Qwen3-4B": _publish(QWEN3, 2560, 9728, 36, 32, 8, 151936, 40960, True),
    "Qwen/Qwen3-8B": _publish(QWEN3, 4096, 12288, 36, 32, 8, 151936, 40960, False),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _publish(
        QWEN2, *(1536, 8960, 28, 12, 2, 151936, 131072, False), rope_theta=1e4
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _publish(
        QWEN2, *(3584, 18944, 28, 28, 4, 152064, 131072, False), rope_theta=1e4
    ),
    "Qwen/Qwen3-32B": _publish(QWEN3, 5120, 25600, 64, 64, 8, 151936, 40960, False),
    "meta-llama/Llama-3.1-8B-Instruct": _publish(LLAMA3, 4096, 14336, 32, 32, 8, 128256, 131072, False),
    "meta-llama/Llama-3.2-1B-Instruct": _publish(
        LLAMA3,
        *(2048, 8192, 16, 32, 8, 128256, 131072, True),
        head_dim=64,
        rope_scaling={**LLAMA3_ROPE, "factor": 32.0},
    ),
    "Qwen/Qwen3-30B-A3B": {
        **_publish(QWEN3, *(2048, 6144, 48, 32, 4, 151936, 40960, False), model_type="qwen3_moe", num_experts=128),
        **{"num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
    },
    "lmsys/gpt-oss-20b-bf16": {
        **_publish({"model_type": "gpt_oss"}, 2880, 2880, 24, 64, 8, 201088, 131072, False),
        **{"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "rope_theta": 150000},
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
            "original_max_position_embeddings": 4096,
        },
    },
    "Qwen/Qwen3-235B-A22B": {
        **_publish(QWEN3, *(4096, 12288, 94, 64, 4, 151936, 40960, False), model_type="qwen3_moe", num_experts=128),
        **{"num_experts_per_tok": 8, "moe_intermediate_size": 1536, "norm_topk_prob": True},
    },
}
"""Fields of config.json that determine sizes and layers, as published, by the name on the hub, as in model.path: a job
is planned without the model's files.
"""
SAMPLE_BYTES = 64
"""Bytes per token of an iteration in the driver: ids, log-probs, values, advantages, returns and masks"""
FIRST, LAST = (f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))


Node = schema.TrainedRoleConfig | schema.ReferenceConfig


@dataclass(frozen=True)
class PlannedModels:
    policy: Architecture
    critic: Architecture
    reference: Architecture


def find_models(config: Config) -> PlannedModels:
    """The sizes of the models, from their files where they exist locally, else as published; nothing is downloaded.

    Raises ConfigError naming model.path, critic.init or reference.init.
    """
    if config.model.source is schema.ModelSource.random:
        policy = describe_random(config.model.random)
    elif config.model.source is schema.ModelSource.path:
        policy = find_architecture(str(config.model.path), "model.path")
    else:
        policy = _read(resolve_checkpoint(config.model, default_cache_dir()), "model.source")
    others = {"critic": needs_critic(config.algo), "reference": needs_reference(config.algo)}
    starts = {role: getattr(config, role).init if is_needed else None for role, is_needed in others.items()}
    own = (policy if start is None else find_architecture(start, f"{role}.init") for role, start in starts.items())
    return PlannedModels(policy, *own)


def find_architecture(name: str, key: str) -> Architecture:
    """The sizes of a checkpoint directory, a model in the Hugging Face cache, or one of PUBLISHED."""
    directory = Path(name).expanduser()
    if (directory / "config.json").is_file():
        return _read(directory, key)
    if (cached := find_in_cache(name)) is not None:
        return _read(cached, key)
    if name in PUBLISHED:
        return parse_architecture(PUBLISHED[name], Path(name))
    nowhere = f"no config.json is in {directory.absolute()} or, under that name, in the local Hugging Face cache"
    known = f"its sizes are not among those known here: {', '.join(PUBLISHED)}"
    raise ConfigError([f"{key}: {name!r} found; {nowhere}, and {known}"])


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


def describe_random(random: schema.RandomModelConfig) -> Architecture:
    """The sizes of model.source=random, whose files need not exist yet."""
    fields = build_random_fields(random, len(random.alphabet) + len(SPECIAL_TOKENS))
    return parse_architecture({"model_type": random.family, **fields}, Path("model.random"))


def build_jobs(config: Config, models: PlannedModels, on_gpu: bool) -> dict[str, m.RoleJob]:
    """The roles that the algorithm needs, in the order policy, critic, reference.

    Raises ConfigError for a layout that does not divide its model, and for replay of routes that it does not have.
    """
    nodes: dict[str, Node] = {"policy": config.policy}
    nodes |= {"critic": config.critic} if needs_critic(config.algo) else {}
    nodes |= {"reference": config.reference} if needs_reference(config.algo) else {}
    jobs = {name: _build_job(config, name, node, models, on_gpu) for name, node in nodes.items()}
    problems = list(check_serving_layout(models.policy, config.rollout.tp)) if config.has_servers else []
    for name, job in jobs.items():
        problems += check_layout(job.arch, job.parallel, f"{name}.parallel", config.model.megatron)
    if config.rollout.router_replay:
        problems += check_router_replay(models.policy)
    if problems:
        raise ConfigError(problems)
    return jobs


def _build_job(config: Config, name: str, node: Node, models: PlannedModels, on_gpu: bool) -> m.RoleJob:
    megatron, is_critic = config.model.megatron, name == "critic"
    chosen = choose_recomputed(getattr(models, name).experts is not None, on_gpu=on_gpu)
    return m.RoleJob(
        *(name, node, getattr(models, name)),
        *find_microbatch(config, node.parallel, find_longest(config, is_critic=is_critic)),
        on_gpu=on_gpu,
        holds_reference=name == "policy" and needs_full_kl(config.algo),
        caches_fp8=m.uses_fp8(node) and not megatron.get("disable_parameter_transpose_cache"),
        modules=tuple(megatron.get("recompute_modules") or chosen),
    )


def find_longest(config: Config, is_critic: bool = False) -> int:
    """The maximum number of tokens of a sequence; is_critic: of the critic's, with data.critic_prompt."""
    own = config.data.num_critic_tokens if is_critic else 0
    return own + config.data.prompt_length + config.rollout.response_length


def find_microbatch(config: Config, parallel: schema.ParallelConfig, longest: int) -> tuple[m.MicroBatch, int]:
    """The largest micro-batch that packing makes (mcore/microbatches.py), nearly all of it response tokens, and the
    number of micro-batches per minibatch on a data-parallel rank if every sequence has its maximum length, `longest`.
    """
    train = config.train
    budget = train.tokens_per_microbatch * parallel.cp
    tokens = min(max(budget, longest), ceil(train.num_samples / parallel.dp) * longest)
    share = ceil(train.minibatch_size / parallel.dp)
    number = ceil(share / max(1, budget // longest))
    own = ceil(tokens / parallel.cp)
    return m.MicroBatch(own, own, longest), number


@dataclass(frozen=True)
class JobPlan:
    jobs: Mapping[str, m.RoleJob]
    stages: Mapping[str, tuple[m.StageMemory, ...]]
    places: Mapping[str, tuple[int, ...]]
    """The GPU of every rank of each role and of the servers"""
    gpus: tuple[m.GpuPlan, ...]
    server: m.ServerMemory | None
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

    @property
    def checkpoint_bytes(self) -> int:
        """What the ranks of policy and critic write in all."""
        trained = [(job, stage) for name, job in self.jobs.items() if job.is_trained for stage in self.stages[name]]
        sizes = [(job, stage, job.parallel.num_processes // job.parallel.pp) for job, stage in trained]
        return sum(m.compute_saved(job, stage.parameters, rank) for job, stage, end in sizes for rank in range(end))


def build_plan(config: Config, models: PlannedModels, mean_response: float | None = None) -> JobPlan:
    """The plan of a job on a cluster whose hardware is known.

    mean_response: mean tokens of a response, for seconds; None: as assumed.

    Raises ConfigError for a layout that does not divide its model, and where the GPUs of a node are not counted.
    """
    if config.cluster.gpus_per_node == 0:
        raise ConfigError(["cluster.gpus_per_node: found 0; a plan needs the number of GPUs of a node"])
    jobs = build_jobs(config, models, on_gpu=True)
    stages = {name: m.estimate_stages(job, count_job(config, job)) for name, job in jobs.items()}
    rollout, places, longest = config.rollout, m.place_job(config), find_longest(config)
    weights = m.compute_server_weights(models.policy, rollout.tp, rollout.dtype)
    gpus = m.plan_gpus(
        *(config, jobs, stages, places),
        lambda free: m.estimate_server(models.policy, rollout, weights, free, longest),
    )
    servers = [each.server for each in gpus if each.server is not None]
    server = min(servers, key=lambda memory: memory.kv_cache, default=None)
    transfer = estimate_transfer(jobs["policy"], stages["policy"], rollout, weights)
    host = compute_host(config, jobs, stages, places, server.kv_tokens if server else 0)
    problems = tuple(_find_problems(config, server, longest, gpus, host))
    work = describe_work(config, mean_response)
    seconds = estimate_seconds(config, jobs, stages, server, transfer, work)
    left = config.cluster.hardware.memory_gib * m.GIB - max(max(each.phases.values()) for each in gpus)
    return JobPlan(jobs, stages, places, gpus, server, transfer, seconds, work.response, host, left, problems)


def count_job(config: Config, job: m.RoleJob) -> tuple[StageParameters, ...]:
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
    arch: Architecture, layout: tuple[int | bool, ...], dtype: schema.Dtype, megatron: str, with_value_head: bool
) -> tuple[StageParameters, ...]:
    # Only now: Megatron takes seconds to import, which a job on unknown hardware need not wait for.
    from megarl.mcore.model import count_stages

    return count_stages(arch, schema.ParallelConfig(*layout), dtype, json.loads(megatron), with_value_head)  # type: ignore[arg-type]


def compute_host(
    config: Config,
    jobs: Mapping[str, m.RoleJob],
    stages: Mapping[str, tuple[m.StageMemory, ...]],
    places: Mapping[str, Sequence[int]],
    kv_tokens: int,
) -> int:
    """Host memory of the fullest node in bytes.

    It has processes, Ray's object store, what is offloaded, the weights of several teachers, the copy that a checkpoint
    makes before it is written, and on the first node an iteration's samples. With rollout.router_replay the experts of
    a token are 4 bytes each beside a server's cache of `kv_tokens` (SGLang's state_capturer/base.py), and one in a
    sample and one in the policy's sequences.
    """
    per_node = config.cluster.gpus_per_node
    process = int(m.HOST_PROCESS_GIB * m.GIB)
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
            saved = m.compute_saved(job, memory.parameters, rank % per_stage) if saves else 0
            own = config.reference.by_source if name == "reference" else {}
            teachers = memory.weights * (1 + len(own)) if own else 0
            nodes[gpu // per_node] += process + memory.offloaded + saved + teachers
    critic_ids = 8 * find_longest(config, is_critic=True) if "critic" in jobs and config.data.num_critic_tokens else 0
    nodes[0] += config.train.num_samples * (find_longest(config) * (SAMPLE_BYTES + 2 * routed) + critic_ids)
    return max(nodes.values()) + (config.cluster.object_store_mb << 20)


def _find_problems(
    config: Config, server: m.ServerMemory | None, longest: int, gpus: tuple[m.GpuPlan, ...], host: int
) -> Iterator[str]:
    """Of the GPUs that there are, of the servers, of memory: one problem for each set of processes that does not fit,
    in the phase that needs most.
    """
    yield from (message for message in check_cluster(config) if message.startswith(("rollout.tp:", "cluster:")))
    if server is not None:
        found = f"rollout.sglang.mem_fraction_static: found {server.fraction:g}"
        if server.num_longest < 1:
            yield (
                f"{found}; beside weights of {server.weights / m.GIB:.1f} GiB it leaves memory for {server.kv_tokens}"
                f" tokens of KV cache on each GPU; one sequence may have {longest}"
            )
        if server.reserve < m.SERVER_GIB * m.GIB and config.rollout.kv_cache_tokens is None:
            yield (
                f"{found}, which leaves {server.reserve / m.GIB:.1f} GiB of a GPU for everything but weights and KV"
                f" cache; CUDA graphs and activations take about {m.SERVER_GIB:g}"
            )
    limit, seen = config.cluster.hardware.memory_gib, set()
    for plan in gpus:
        phase = max(plan.phases, key=lambda name: plan.phases[name])
        roles = tuple(plan.stages)
        if plan.phases[phase] > int(limit * m.GIB) and roles not in seen:
            seen.add(roles)
            who = [f"{role} stage {stage}" for role, stage in plan.stages.items()] + [SERVERS] * bool(plan.server)
            taken = f"{phase} takes {plan.phases[phase] / m.GIB:.1f} GiB of {limit:.1f}"
            yield f"GPU {plan.gpus[0]} ({', '.join(who)}): {taken}"
    has = config.cluster.hardware.host_memory_gib
    if host > has * m.GIB:
        yield f"the fullest node takes {ceil(host / m.GIB)} GiB of host memory of {has:g}"


MAX_CHANGES = 4
"""Changes that are made one after the other for a job that does not fit"""
FRACTIONS = (0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.82, 0.84, 0.86, 0.88, 0.9, 0.92, 0.94)
"""rollout.sglang.mem_fraction_static"""
FRACTION, MODULES = "rollout.sglang.mem_fraction_static", "model.megatron.recompute_modules"
FACTORS = (1, 2, 4, 8)
SHAPE = ("cluster.placement", ".parallel.", "rollout.tp")
"""Parts of the keys that make two plans of a search different"""
NUM_BEST = 10
LONGEST_UNSAVED_S = 4500
"""Seconds of training that a lost node may cost at most, unless one iteration takes longer: about an hour"""
DEADLINE_S = 600
"""What a deadline of a planned job is a multiple of"""
NO_JOB = (float("inf"),)
LEAST_LEFT, SHARE_LEFT = 4 * m.GIB, 1 / 16
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

    The check at the start of every job. Only clusters whose hardware is known (cluster.hardware) are planned.
    """
    if config.cluster.hardware.gpu is None:
        return []
    try:
        plan = build_plan(config, models)
    except ConfigError as error:
        return list(error.problems)
    if not plan.problems:
        return []
    change = find_change(config, models, plan)
    advice = f"it fits with {' '.join(change.overrides)}" if change else "none of the changes that were tried helps"
    refused = f"the job does not fit {config.cluster.hardware.gpu}; {advice}"
    return [*plan.problems, f"cluster.hardware: {refused}; cluster.hardware.gpu=null starts it without a plan"]


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
    store = cluster.object_store_mb - ceil(plan.host_bytes / m.GIB - cluster.hardware.host_memory_gib) * 1024
    if 1024 <= store < cluster.object_store_mb:
        yield {"cluster.object_store_mb": store}
    yield from (values for role in roles for values in _list_steps(config, [role]))
    for factor in FACTORS[1:]:
        yield {"rollout.tp": rollout.tp * factor, "rollout.num_servers": max(1, rollout.num_servers // factor)}
    offloads = {f"{role}.offload": schema.Offload.all for role in roles}
    together = {"cluster.placement": Placement.colocated, "rollout.transport": Transport.colocated, **offloads}
    placements: list[Values] = [{"cluster.placement": Placement.split}, {"cluster.placement": Placement.apart}]
    yield from (*placements, placements[0] | offloads, together, {**together, FRACTION: 0.5})
    yield from _list_steps(config, roles)
    yield _list_nodes(config, 1 + plan.last_gpu // cluster.gpus_per_node)
    yield from (values | _list_nodes(config, 2 * cluster.num_nodes) for values in placements)
    for group, factor in itertools.product([*([role] for role in roles), roles], FACTORS[1:]):
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
    for kind in (schema.Recompute.full, schema.Recompute.selective, schema.Recompute.none) if trained else ():
        modules = {MODULES: ["mlp"]} if kind is schema.Recompute.selective else {}
        kinds.append({f"{role}.recompute": kind for role in trained} | modules)
    length = ceil(find_longest(config) / parallel.cp)
    sizes: list[Values] = [{"train.tokens_per_microbatch": number * length} for number in (8, 4, 2, 1)]
    yield from (*kinds, *sizes, *(kind | size for kind, size in itertools.product(kinds, sizes)))
    yield from ({f"{role}.offload": offload for role in roles} for offload in (schema.Offload.all, None))
    now = float(config.rollout.sglang.get("mem_fraction_static") or m.DEFAULT_FRACTION)
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


def complete(loaded: Loaded) -> Loaded:
    """With model.plan=fastest and a GPU that is known, completed by the fastest plan of the search, by deadlines of
    twice the planned seconds or more, and by checkpoints about every hour. Raises ConfigError where no plan fits.
    """
    config, typed = loaded.config, list_typed(loaded.overrides)
    is_planned = config.model.plan is schema.ModelPlan.fastest and not config.has_critic_alone
    if not is_planned or config.cluster.hardware.gpu is None:
        return loaded
    there = f"{config.cluster.num_nodes * config.cluster.gpus_per_node} {config.cluster.hardware.gpu}"
    found = search(loaded.overrides, find_models(config), number=1)
    if not found:
        right = "a larger cluster, a shorter rollout.response_length, or fewer keys that are typed"
        raise ConfigError([f"model.plan: no plan that was tried fits {there}; {right}; model.plan=none tries none"])
    plan = found[0].plan
    seconds, every = plan.seconds, find_save_every(config.checkpoint.save_every, plan.seconds.iteration)
    written = plan.checkpoint_bytes / config.cluster.num_nodes / config.cluster.hardware.disk_gb_s / 1e9
    least = {
        "rollout.request_deadline_s": seconds.generation,
        "rollout.sync_deadline_s": seconds.sync,
        "cluster.call_deadline_s": max(seconds.scoring, seconds.update),
        "checkpoint.stop_deadline_s": written,
    }
    values: Values = {key: DEADLINE_S * ceil(2 * least[key] / DEADLINE_S) for key in least}
    values = {key: value for key, value in values.items() if value > read_value(config, key)}
    values = {key: value for key, value in (values | {"checkpoint.save_every": every}).items() if key not in typed}
    overrides = [*found[0].overrides, *_write(config, values), "model.plan=none"]
    line = f"model.plan: {seconds.iteration:,.0f} s an iteration on {there} with {' '.join(sorted(overrides))}"
    overrides = [*loaded.overrides, *overrides]
    return Loaded(load_config(overrides), overrides, [*loaded.lines, line])


def find_save_every(every: int | None, iteration: float) -> int | None:
    """checkpoint.save_every, or one in an hour of these iterations where they are far more. iteration: in seconds."""
    return every if every is None or every * iteration <= LONGEST_UNSAVED_S else max(1, int(3600 / iteration))


def search(
    arguments: Sequence[str],
    models: PlannedModels,
    mean_response: float | None = None,
    staleness: int = 0,
    number: int = NUM_BEST,
) -> list[Change]:
    """The `number` fastest plans that fit, each with another placement, layout or servers, the fastest first.

    arguments: of the command line; keys that it sets keep their values. Every plan is that of a job which was loaded
    with the arguments and the plan's overrides. staleness: rollout.max_staleness.
    """
    base = load_config(arguments)
    start: Values = {"rollout.max_staleness": staleness}
    if staleness and any(check_older_samples(base.algo, "")):
        start["algo.mismatch.correction"] = type(base.algo.mismatch.correction)["tis"]
    given = list_typed(arguments)
    config, reserve = apply(base, start), min(LEAST_LEFT, SHARE_LEFT * base.cluster.hardware.memory_gib * m.GIB)
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
        if len(found) == number:
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
    if values.get("policy.recompute") is not schema.Recompute.selective:
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
        values |= {f"{role}.offload": schema.Offload.all if shares else None for role in roles}
        if has_servers:
            values["rollout.transport"] = Transport.colocated if shares else Transport.split
            values["rollout.offload"] = ServerOffload.all if shares else None
        found: list[Values] = []
        for tp, ep, size in itertools.product(
            FACTORS, (config.policy.parallel.ep, 1), FACTORS if has_servers else (1,)
        ):
            layout = values | _size(roles, num_processes=num_processes, tp=tp, pp=1, vpp=1, cp=1, ep=ep)
            if has_servers:
                layout |= {"rollout.tp": size, "rollout.num_servers": max(1, servers // size)}
            found.append(_end_stages(config, models, layout))
        yield found
