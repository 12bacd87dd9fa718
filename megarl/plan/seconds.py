"""Seconds of an iteration by phase: floating-point operations and bytes over the assumed shares of the peaks.

A rank computes, for each layer of its pipeline stage and each micro-batch, one after the other: matrix products and
attention (floating-point operations over the peak), its other operations (bytes over the memory's bandwidth), what it
sends to other ranks and does not hide behind the products (bytes over the link), and what does not shrink with the
tokens (starting kernels; with experts, waiting for the host, which counts the tokens of each expert).
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

import torch

from megarl.algo.objective import scores_first
from megarl.config.placement import list_groups, place
from megarl.config.schema.roles import Offload, ParallelConfig, Recompute, RecomputeMethod, TrainedRoleConfig
from megarl.config.schema.root import ClusterConfig, Config, Placement, RolloutConfig, Transport
from megarl.mcore.device import find_processor
from megarl.mcore.microbatches import count_layer_work
from megarl.models.architecture import Architecture
from megarl.plan import memory as m

# What no formula gives; printed with the plan.
PRODUCT_SHARE = 0.72
"""Share of the bfloat16 peak in matrix products"""
FP8_SHARE = 0.62
"""Share of the FP8 peak in matrix products, casts included"""
ATTENTION_SHARE = 0.50
"""Share of the bfloat16 peak in attention's core (FlashAttention-3, 2407.08608: 0.5 to 0.75 forward, less backward)"""
MEMORY_SHARE = 0.80
"""Share of the memory's bandwidth in all other operations"""
MEMORY_PASSES = 2.0
"""How often a forward pass moves what a layer of unfused operations keeps: written once and read once. The shares were
tuned with it."""
LOGIT_PASSES = 4.0
"""How often log-probs move the logits as float32"""
LAYER_S = 0.0003
"""Seconds of a layer's forward pass besides its tokens"""
EXPERT_LAYER_S = 0.003
"""The same of a layer with experts, in which the host counts each expert's tokens"""
PREFILL_SHARE = 0.45
"""Share of the peak in reading prompts"""
DECODE_SHARE = 0.50
"""Share of the peak in the matrix products of a generation step"""
DECODE_BANDWIDTH = 0.60
"""Share of the GPU's peak memory bandwidth during generation"""
DECODE_STEP_S = 0.006
"""Additional time of each generation step: scheduling, kernel launches, all-reduces"""
LINK_SHARE = 0.80
"""Share of the peak bandwidth of NVLink, network and PCIe"""
MEAN_RESPONSE = 0.5
"""Mean response length as a share of rollout.response_length; seconds follow from it, memory from the limit"""


@dataclass(frozen=True)
class Work:
    """What a role computes in an iteration."""

    num_samples: int
    minibatch: int
    """Samples of an optimizer step"""
    prompt: int
    response: float
    """Tokens of a sample on average"""
    budget: int
    """train.tokens_per_microbatch"""

    @property
    def length(self) -> float:
        return self.prompt + self.response


@dataclass(frozen=True)
class LayerSeconds:
    """A layer's forward pass over one micro-batch on one rank."""

    products: float
    """Matrix products without those of attention's core"""
    attention: float
    memory: float
    tensor_parallel: float
    context_parallel: float
    experts: float
    """Sending tokens to the ranks that have their experts, and back"""
    fixed: float
    has_frozen_weights: bool = False
    """Beside adapters the gradients of matrices, half of the products, are left out."""

    @property
    def forward(self) -> float:
        sent = self.tensor_parallel + self.context_parallel + self.experts
        return self.products + self.attention + self.memory + sent + self.fixed

    @property
    def backward(self) -> float:
        """Twice the operations and bytes. Of the four collectives of tensor parallelism two are hidden behind products
        (megarl's linear layers are Megatron's: the gathered input behind the input's gradient, the scattered gradient
        behind the weight's, megatron/core/tensor_parallel/layers.py).
        """
        sent = self.tensor_parallel / 2 + 2 * self.context_parallel + self.experts
        frozen = self.products if self.has_frozen_weights else 0.0
        return 2 * (self.products + self.attention + self.memory + self.fixed) - frozen + sent


def compute_sending(cluster: ClusterConfig, num_ranks: int, num_bytes: float) -> float:
    """Seconds in which a rank sends so many bytes, evenly, to the others of a group of ranks in a row: those of its
    node over NVLink and at the same time others over the network.
    """
    near = min(num_ranks, cluster.gpus_per_node)
    leaving = num_bytes * ((num_ranks - near) / max(1, num_ranks - 1))
    return max(
        leaving / _speed(cluster.hardware.network_gb_s), (num_bytes - leaving) / _speed(cluster.hardware.nvlink_gb_s)
    )


def _speed(gb_s: float) -> float:
    """Bytes a second of a link with this peak."""
    return gb_s * 1e9 * LINK_SHARE


def compute_forward(job: m.RoleJob, stages: tuple[m.StageMemory, ...], work: Work, cluster: ClusterConfig) -> float:
    """Log-probs or values of all samples of an iteration."""
    number, tokens = count_microbatches(job, work, ceil(work.num_samples / job.parallel.dp))
    slowest = max(_compute_stage(job, stages, work, cluster, tokens), key=lambda each: each[0])
    return _fill_pipeline(job.parallel, number) * slowest[0]


def compute_update(job: m.RoleJob, stages: tuple[m.StageMemory, ...], work: Work, cluster: ClusterConfig) -> float:
    """One epoch of optimizer steps over the samples of an iteration."""
    number, tokens = count_microbatches(job, work, ceil(work.minibatch / job.parallel.dp))
    slowest = max(sum(each) for each in _compute_stage(job, stages, work, cluster, tokens))
    reducing = max(reduce_gradients(job, stage, cluster) for stage in stages)
    return work.num_samples / work.minibatch * (_fill_pipeline(job.parallel, number) * slowest + reducing)


def count_microbatches(job: m.RoleJob, work: Work, num_samples: int) -> tuple[int, float]:
    """Micro-batches that a data-parallel rank packs so many samples into, and the tokens of one on each rank."""
    budget = max(work.budget * job.parallel.cp, work.length)
    number = ceil(num_samples * work.length / budget)
    return number, num_samples * work.length / number / job.parallel.cp


def _fill_pipeline(parallel: ParallelConfig, number: int) -> float:
    """Micro-batches whose time passes on each stage; it waits for pp - 1 others while the pipeline fills and empties,
    with interleaving for a vpp-th of them (Narayanan et al. 2104.04473, section 2.2).
    """
    return number + (parallel.pp - 1) / parallel.vpp


def _compute_stage(
    job: m.RoleJob, stages: tuple[m.StageMemory, ...], work: Work, cluster: ClusterConfig, tokens: float
) -> list[tuple[float, float]]:
    """Seconds of the forward and of the backward pass of each stage over one micro-batch, recomputation included."""
    layer = compute_layer_seconds(job, cluster, tokens, work.length)
    # The output layer and the log-probs of the tokens that predict; the logits pass through memory in float32.
    hardware, predicting = cluster.hardware, tokens * work.response / work.length
    rows = count_multiply_adds(job.arch, job.has_value_head)[2] / job.parallel.tp
    head = 2 * predicting * rows / (hardware.bf16_tflops * 1e12 * PRODUCT_SHARE)
    if not job.has_value_head:
        logits = predicting * job.arch.vocab_size / job.parallel.tp
        head += LOGIT_PASSES * 4 * logits / (hardware.hbm_gb_s * 1e9 * MEMORY_SHARE)
    found = []
    for number, stage in enumerate(stages):
        count = stage.parameters.num_layers
        last = head if number == len(stages) - 1 else 0.0
        again = _compute_again(job, layer, count)
        found.append((count * layer.forward + last, count * layer.backward + again + 2 * last))
    return found


def _compute_again(job: m.RoleJob, layer: LayerSeconds, num_layers: int) -> float:
    """What is computed twice (Korthikanti et al. 2205.05198, section 5)."""
    node = job.node
    if not isinstance(node, TrainedRoleConfig) or node.recompute is Recompute.none:
        return 0.0
    if node.recompute is Recompute.full:
        is_part = node.recompute_method is RecomputeMethod.block
        count = min(num_layers, node.recompute_num_layers * job.parallel.vpp) if is_part else num_layers
        return count * layer.forward
    attention, mlp, arch = layer.attention if "core_attn" in job.modules else 0.0, 0.0, job.arch
    if {"mlp", "moe"} & set(job.modules):
        projections = arch.num_layers * 2 * arch.hidden_size * arch.head_size * (arch.num_heads + arch.num_kv_heads)
        mlp = (1 - projections / count_multiply_adds(arch, True)[0]) * layer.products + layer.experts
    return num_layers * (attention + mlp)


def compute_layer_seconds(job: m.RoleJob, cluster: ClusterConfig, tokens: float, length: float) -> LayerSeconds:
    """tokens: of a micro-batch on one rank. length: of a sequence."""
    arch, parallel, b = job.arch, job.parallel, m.ELEMENT_BYTES[job.dtype]
    hardware = cluster.hardware
    per_token, per_square, _ = count_multiply_adds(arch, job.has_value_head)
    products = 2 * tokens * per_token / arch.num_layers / parallel.tp
    attention = 2 * tokens * length * per_square / arch.num_layers / parallel.tp
    peak = hardware.fp8_tflops * FP8_SHARE if m.uses_fp8(job.node) else hardware.bf16_tflops * PRODUCT_SHARE
    attending = attention / (hardware.bf16_tflops * 1e12 * ATTENTION_SHARE)
    split = tokens / parallel.tp if parallel.sp else tokens
    whole = m.MicroBatch(ceil(tokens), ceil(tokens), ceil(length))
    kept = m.compute_layer(arch, parallel, job.dtype, whole, on_gpu=None).total
    # Two gathers and two scatters of [tokens, h]; without sequence parallelism two all-reduces, which are as much.
    crossing = 4 * tokens * arch.hidden_size * b * (parallel.tp - 1) / parallel.tp
    keys = 2 * tokens * max(1, arch.num_kv_heads // parallel.tp) * arch.head_size * b * (parallel.cp - 1)
    ring = compute_sending(cluster, parallel.tp * parallel.cp, keys)
    routed = 0.0
    if arch.experts:
        group = parallel.ep * parallel.etp
        routed = 2 * split * arch.experts.top_k * arch.hidden_size * b * (group - 1) / group
        routed = compute_sending(cluster, group, routed)
    return LayerSeconds(
        products=products / (peak * 1e12),
        attention=attending,
        memory=MEMORY_PASSES * kept / (hardware.hbm_gb_s * 1e9 * MEMORY_SHARE),
        tensor_parallel=compute_sending(cluster, parallel.tp, crossing),
        # Ring attention computes with one part of the keys while the next arrives (Liu et al. 2310.01889).
        context_parallel=max(0.0, ring - attending),
        experts=routed,
        fixed=EXPERT_LAYER_S if arch.experts else LAYER_S,
        has_frozen_weights=isinstance(job.node, TrainedRoleConfig) and job.node.lora.rank > 0,
    )


def reduce_gradients(job: m.RoleJob, stage: m.StageMemory, cluster: ClusterConfig) -> float:
    """Scattering the float32 gradients over the replicas and gathering the weights, as if nothing of it were hidden."""
    parallel, parameters = job.parallel, stage.parameters
    each, group = m.GRADIENT_BYTES + m.ELEMENT_BYTES[job.dtype], parallel.num_processes // parallel.pp
    hardware = cluster.hardware
    speed = _speed(hardware.network_gb_s if group > cluster.gpus_per_node else hardware.nvlink_gb_s)
    parts = zip(m.count_replicas(job), m.count_trained(job, parameters), strict=True)
    return sum(size * each * (number - 1) / number / speed for number, size in parts)


def count_multiply_adds(arch: Architecture, with_value_head: bool) -> tuple[int, int, int]:
    """Of a forward pass: per token, per squared token of a sequence, per response token (mcore/microbatches.py)."""
    return (*count_layer_work(arch), arch.hidden_size * (1 if with_value_head else arch.vocab_size))


def compute_generation(config: Config, job: m.RoleJob, work: Work, server: m.ServerMemory) -> float:
    """Seconds of prefill and of one step per token: for the sequences that run at once, and for the end, when none
    waits any more, the running ones finish, the last of them at the length limit.

    Lengths are taken to be uniform around their mean, the longest at the limit. Then what is left of a running response
    is (mean^2 + variance) / (2 mean) on average, as of any renewal process (Cox, Renewal Theory, section 5.4).
    """
    rollout, limit = config.rollout, config.rollout.response_length
    waiting = work.num_samples / rollout.num_servers
    room = server.kv_tokens / work.length
    running = max(1.0, min(waiting, rollout.max_running_requests, room))
    mean = work.response
    context = work.prompt + mean / 2
    step = functools.partial(compute_step, config, job, server, context)
    per_token, _, _ = count_multiply_adds(job.arch, False)
    peak = rollout.tp * config.cluster.hardware.bf16_tflops * 1e12
    prefill = 2 * per_token * work.prompt * waiting / (peak * PREFILL_SHARE)
    if waiting <= running:
        return prefill + limit * step(waiting * min(1.0, mean / limit))
    shortest = max(0.0, 2 * mean - limit)
    variance = (limit - shortest) ** 2 / 12
    left = min(limit, (mean**2 + variance) / (2 * mean))
    full = max(0.0, (waiting * mean - running * left) / running)
    return prefill + full * step(running) + limit * step(max(1.0, running * left / limit))


def compute_step(config: Config, job: m.RoleJob, server: m.ServerMemory, context: float, sequences: float) -> float:
    """One token for each of so many sequences: the weights are read once and multiplied with all of them, whichever
    takes longer, and each sequence's KV cache is read. Of experts those are read that some token goes to.
    """
    hardware, arch = config.cluster.hardware, job.arch
    bandwidth = hardware.hbm_gb_s * 1e9 * DECODE_BANDWIDTH
    per_token, _, per_response = count_multiply_adds(arch, False)
    products = 2 * sequences * (per_token + per_response)
    products /= config.rollout.tp * hardware.bf16_tflops * 1e12 * DECODE_SHARE
    weights = float(server.weights)
    if arch.experts:
        experts = arch.experts
        matrices = arch.num_expert_layers * experts.num_experts * 3 * arch.hidden_size * experts.ffn_size
        size = 2 * matrices / config.rollout.tp
        weights -= size * (1 - experts.top_k / experts.num_experts) ** ceil(sequences)
    cache = sequences * context * server.bytes_per_token
    return max(weights / bandwidth, products) + cache / bandwidth + DECODE_STEP_S


@dataclass(frozen=True)
class Transfer:
    total: int
    received: int
    """Bytes received by each server rank"""
    sent: int
    """Bytes sent by the training rank that sends most, where replicas share evenly"""

    @property
    def busiest(self) -> int:
        return max(self.sent, self.received)


def estimate_transfer(
    job: m.RoleJob, stages: Sequence[m.StageMemory], rollout: RolloutConfig, server_weights: int
) -> Transfer:
    """job: the policy's. server_weights: bytes of a server rank. With rollout.file nothing is sent."""
    if rollout.file is not None:
        return Transfer(0, 0, 0)
    size, (replicas, expert_replicas) = m.ELEMENT_BYTES[rollout.dtype], m.count_replicas(job)
    sent = max(stage.parameters.dense / replicas + stage.parameters.experts / expert_replicas for stage in stages)
    num_ranks = rollout.num_servers * rollout.tp
    return Transfer(num_ranks * server_weights, server_weights, int(sent * size * rollout.num_servers))


def compute_sync_seconds(config: Config, transfer: Transfer) -> float:
    """Seconds of a sync by its busiest port, over the network or, on a single node, NVLink. With transport=disk the
    policy's nodes write the checkpoint together and then each node with a server reads all of it, once.
    """
    hardware, cluster = config.cluster.hardware, config.cluster
    if config.rollout.transport is Transport.disk:
        size, per_node = transfer.received * config.rollout.tp, cluster.gpus_per_node
        writers = max(1, min(cluster.num_nodes, config.policy.parallel.num_processes // per_node))
        return (size / writers + size) / (hardware.disk_gb_s * 1e9)
    link = hardware.network_gb_s if cluster.num_nodes > 1 else hardware.nvlink_gb_s
    return transfer.busiest / (link * 1e9 * LINK_SHARE)


@dataclass(frozen=True)
class Seconds:
    """An iteration, or one of value pretraining."""

    generation: float
    """0 with saved rollouts"""
    scoring: float
    """Log-probs and values of policy, reference and critic; in value pretraining those that it needs"""
    update: float
    sync: float = 0.0
    offload: float = 0.0
    """Moving weights and optimizer between GPU and host"""
    mfu: Mapping[str, float] = field(default_factory=dict)
    """Model FLOPs utilization of each role's update: without what is computed twice"""
    pretraining: "Seconds | None" = None
    """None: there is no value pretraining"""
    overlaps: bool = False
    """rollout.max_staleness: the next responses are generated while the roles compute"""

    @property
    def training(self) -> float:
        """What the training processes do between two rollouts, without the sync."""
        return self.scoring + self.update + self.offload

    @property
    def iteration(self) -> float:
        """With max_staleness responses are generated while the roles compute, and wait during the sync
        (megarl/rollout/source.py): the slower of both decides.
        """
        if self.overlaps:
            return max(self.generation, self.training) + self.sync
        return self.generation + self.training + self.sync


def describe_work(config: Config, mean_response: float | None = None) -> Work:
    """mean_response: tokens; None: MEAN_RESPONSE of the limit."""
    mean = MEAN_RESPONSE * config.rollout.response_length if mean_response is None else mean_response
    train = config.train
    return Work(train.num_samples, train.minibatch_size, config.data.prompt_length, mean, train.tokens_per_microbatch)


def estimate_seconds(
    config: Config,
    jobs: Mapping[str, m.RoleJob],
    stages: Mapping[str, tuple[m.StageMemory, ...]],
    server: m.ServerMemory | None,
    transfer: Transfer,
    work: Work,
) -> Seconds:
    of_critic = replace(work, prompt=work.prompt + config.data.num_critic_tokens)
    works = {name: of_critic if job.has_value_head else work for name, job in jobs.items()}
    forward = {name: compute_forward(job, stages[name], works[name], config.cluster) for name, job in jobs.items()}
    updates = {
        name: compute_update(job, stages[name], works[name], config.cluster) * count_updates(config, job)
        for name, job in jobs.items()
        if job.is_trained
    }
    # Roles that share GPUs take turns on them.
    join = max if config.cluster.placement is Placement.apart else sum
    generation = compute_generation(config, jobs["policy"], work, server) if server else 0.0
    scoring = join([forward[name] for name, job in jobs.items() if scores_rollouts(config, job)] or [0.0])
    pretraining = None
    settings = config.algo.value_pretrain
    if "critic" in jobs and settings.num_steps > 0:
        pretraining = Seconds(
            generation=generation if settings.rollouts is None else 0.0,
            scoring=scoring if config.algo.kl.in_reward else forward["critic"],
            update=updates["critic"],
        )
    return Seconds(
        generation,
        scoring,
        join(updates.values()),
        compute_sync_seconds(config, transfer),
        join(compute_offload(config, job, stages[name]) for name, job in jobs.items()),
        {name: compute_mfu(config, jobs[name], works[name], part) for name, part in updates.items()},
        pretraining,
        overlaps=config.rollout.max_staleness > 0,
    )


def scores_rollouts(config: Config, job: m.RoleJob) -> bool:
    """Whether the role has a forward pass over an iteration's samples before the update: log-probs or values."""
    return job.name != "policy" or scores_first(config)


def count_updates(config: Config, job: m.RoleJob) -> int:
    """Passes of a role over an iteration's samples in its update."""
    critic = config.critic
    repeats = critic.updates_per_policy_update * (1 + critic.replay_iterations) if job.has_value_head else 1
    return config.train.epochs_per_iteration * repeats


def compute_mfu(config: Config, job: m.RoleJob, work: Work, seconds: float) -> float:
    """Of an update: a forward pass and a backward pass of twice as many operations, over the bfloat16 peak."""
    per_token, per_square, per_response = count_multiply_adds(job.arch, job.has_value_head)
    sample = work.length * per_token + work.length**2 * per_square + work.response * per_response
    flops = 6 * sample * work.num_samples * count_updates(config, job)
    return flops / (job.parallel.num_processes * config.cluster.hardware.bf16_tflops * 1e12 * seconds)


def compute_offload(config: Config, job: m.RoleJob, stages: Sequence[m.StageMemory]) -> float:
    """Every call brings the weights and takes them away again: log-probs or values, the update and, of the policy, the
    sync; the update moves the optimizer too (megarl/mcore/optimizer.py).
    """
    if job.node.offload is None:
        return 0.0
    calls = scores_rollouts(config, job) + job.is_trained + (job.name == "policy")
    weights = calls if job.node.offload is Offload.all else 0
    moved = max(2 * (weights * stage.weights + stage.optimizer) for stage in stages)
    return moved / (config.cluster.hardware.pcie_gb_s * 1e9 * LINK_SHARE)


def find_peak_tflops(config: Config) -> float | None:
    """What policy and critic can compute at most, of which model FLOPs utilization is a share: matrix products in 1e12
    operations a second. By the data sheet, in bfloat16, of the GPUs that both have; without a GPU, in policy.dtype, of
    all cores of this machine, measured. None where cluster.hardware is not known.
    """
    hardware, slots = config.cluster.hardware, place(config.cluster, list_groups(config))
    gpus = {(slot.node, gpu) for role in ("policy", "critic") for slot in slots.get(role, ()) for gpu in slot.gpus}
    if gpus:
        return hardware.bf16_tflops * len(gpus) if hardware.gpu is not None else None
    return find_processor().measure_tflops(getattr(torch, config.policy.dtype.value))
