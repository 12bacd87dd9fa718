"""Seconds of one role's forward and backward passes, from its layout.

A rank computes, for each layer of its pipeline stage and each micro-batch, one after the other: matrix products and
attention (floating-point operations over the peak), its other operations (bytes over the memory's bandwidth), what it
sends to other ranks and does not hide behind the products (bytes over the link), and what does not shrink with the
tokens (starting kernels; with experts, waiting for the host, which counts the tokens of each expert).
"""

import functools
from dataclasses import dataclass
from math import ceil

import torch

from megarl.config.schema.hardware import HardwareConfig
from megarl.config.schema.roles import ParallelConfig, Recompute, RecomputeMethod
from megarl.mcore.model.architecture import Architecture
from megarl.mcore.row_costs import compute_row_costs
from megarl.plan import assumptions as a
from megarl.plan.activations import ELEMENT_BYTES, Attention, MicroBatch, compute_layer
from megarl.plan.roles import GRADIENT_BYTES, RoleJob, StageMemory, count_replicas, count_trained
from megarl.types import Sequences


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
        return 2 * (self.products + self.attention + self.memory + self.fixed) + sent


@dataclass(frozen=True)
class Link:
    """How fast a rank sends to the others of a group of ranks in a row."""

    share_outside: float
    """Share of what it sends, of that to all others, that leaves its node"""
    inside: float
    outside: float
    """Bytes a second"""

    def seconds(self, num_bytes: float) -> float:
        """Both links at once."""
        leaving = num_bytes * self.share_outside
        return max(leaving / self.outside, (num_bytes - leaving) / self.inside)


def find_link(hardware: HardwareConfig, per_node: int, num_ranks: int) -> Link:
    inside, outside = (gb_s * 1e9 * a.LINK_SHARE for gb_s in (hardware.nvlink_gb_s, hardware.network_gb_s))
    near = min(num_ranks, per_node)
    return Link((num_ranks - near) / max(1, num_ranks - 1), inside, outside)


def compute_forward(
    job: RoleJob, stages: tuple[StageMemory, ...], work: Work, hardware: HardwareConfig, per_node: int
) -> float:
    """Log-probs or values of all samples of an iteration."""
    number, tokens = count_microbatches(job, work, ceil(work.num_samples / job.parallel.dp))
    slowest = max(_compute_stage(job, stages, work, hardware, per_node, tokens), key=lambda each: each[0])
    return _fill_pipeline(job.parallel, number) * slowest[0]


def compute_update(
    job: RoleJob, stages: tuple[StageMemory, ...], work: Work, hardware: HardwareConfig, per_node: int
) -> float:
    """One epoch of optimizer steps over the samples of an iteration."""
    number, tokens = count_microbatches(job, work, ceil(work.minibatch / job.parallel.dp))
    slowest = max(sum(each) for each in _compute_stage(job, stages, work, hardware, per_node, tokens))
    reducing = max(reduce_gradients(job, stage, hardware, per_node) for stage in stages)
    return work.num_samples / work.minibatch * (_fill_pipeline(job.parallel, number) * slowest + reducing)


def count_microbatches(job: RoleJob, work: Work, num_samples: int) -> tuple[int, float]:
    """Micro-batches that a data-parallel rank packs so many samples into, and the tokens of one on each rank."""
    budget = max(work.budget * job.parallel.cp, work.length)
    number = ceil(num_samples * work.length / budget)
    return number, num_samples * work.length / number / job.parallel.cp


def _fill_pipeline(parallel: ParallelConfig, number: int) -> float:
    """Micro-batches whose time passes on each stage; it waits for pp - 1 others, with interleaving for a vpp-th of
    them (Narayanan et al. 2104.04473, section 2.2).
    """
    return number + count_waited(parallel)


def count_waited(parallel: ParallelConfig) -> float:
    """Micro-batches whose time a stage waits while the pipeline fills and empties."""
    return (parallel.pp - 1) / parallel.vpp


def _compute_stage(
    job: RoleJob, stages: tuple[StageMemory, ...], work: Work, hardware: HardwareConfig, per_node: int, tokens: float
) -> list[tuple[float, float]]:
    """Seconds of the forward and of the backward pass of each stage over one micro-batch, recomputation included."""
    layer = compute_layer_seconds(job, hardware, per_node, tokens, work.length)
    head = _compute_head(job, hardware, tokens * work.response / work.length)
    found = []
    for number, stage in enumerate(stages):
        count = stage.parameters.num_layers
        last = head if number == len(stages) - 1 else 0.0
        again = _compute_again(job, layer, count)
        found.append((count * layer.forward + last, count * layer.backward + again + 2 * last))
    return found


def _compute_again(job: RoleJob, layer: LayerSeconds, num_layers: int) -> float:
    """What is computed twice (Korthikanti et al. 2205.05198, section 5)."""
    saving = job.saving
    if saving.recompute is Recompute.full:
        is_part = saving.method is RecomputeMethod.block
        count = min(num_layers, saving.num_layers * job.parallel.vpp) if is_part else num_layers
        return count * layer.forward
    if saving.recompute is Recompute.none:
        return 0.0
    attention = layer.attention if "core_attn" in saving.modules else 0.0
    is_mlp = {"mlp", "moe"} & set(saving.modules)
    return num_layers * (attention + (_share_of_mlp(job.arch) * layer.products + layer.experts if is_mlp else 0.0))


def compute_layer_seconds(
    job: RoleJob, hardware: HardwareConfig, per_node: int, tokens: float, length: float
) -> LayerSeconds:
    """tokens: of a micro-batch on one rank. length: of a sequence."""
    arch, parallel, b = job.arch, job.parallel, ELEMENT_BYTES[job.dtype]
    per_token, per_square, _ = count_multiply_adds(arch, job.has_value_head)
    products = 2 * tokens * per_token / arch.num_layers / parallel.tp
    attention = 2 * tokens * length * per_square / arch.num_layers / parallel.tp
    peak = hardware.fp8_tflops * a.FP8_SHARE if job.fp8 else hardware.bf16_tflops * a.PRODUCT_SHARE
    attending = attention / (hardware.bf16_tflops * 1e12 * a.ATTENTION_SHARE)
    split = tokens / parallel.tp if parallel.sp else tokens
    whole = MicroBatch(ceil(tokens), ceil(tokens), ceil(length))
    kept = compute_layer(arch, parallel, job.dtype, whole, Attention.flash).total
    # Two gathers and two scatters of [tokens, h]; without sequence parallelism two all-reduces, which are as much.
    crossing = 4 * tokens * arch.hidden_size * b * (parallel.tp - 1) / parallel.tp
    keys = 2 * tokens * max(1, arch.num_kv_heads // parallel.tp) * arch.head_size * b * (parallel.cp - 1)
    ring = find_link(hardware, per_node, parallel.tp * parallel.cp).seconds(keys)
    routed = 0.0
    if arch.experts:
        group = parallel.ep * parallel.etp
        routed = 2 * split * arch.experts.top_k * arch.hidden_size * b * (group - 1) / group
        routed = find_link(hardware, per_node, group).seconds(routed)
    return LayerSeconds(
        products=products / (peak * 1e12),
        attention=attending,
        memory=a.MEMORY_PASSES * kept / (hardware.hbm_gb_s * 1e9 * a.MEMORY_SHARE),
        tensor_parallel=find_link(hardware, per_node, parallel.tp).seconds(crossing),
        # Ring attention computes with one part of the keys while the next arrives (Liu et al. 2310.01889).
        context_parallel=max(0.0, ring - attending),
        experts=routed,
        fixed=a.EXPERT_LAYER_S if arch.experts else a.LAYER_S,
    )


def _compute_head(job: RoleJob, hardware: HardwareConfig, tokens: float) -> float:
    """The output layer and the log-probs of the tokens that predict; the logits pass through memory in float32."""
    rows = count_multiply_adds(job.arch, job.has_value_head)[2] / job.parallel.tp
    products = 2 * tokens * rows / (hardware.bf16_tflops * 1e12 * a.PRODUCT_SHARE)
    logits = 0 if job.has_value_head else tokens * job.arch.vocab_size / job.parallel.tp
    return products + a.LOGIT_PASSES * 4 * logits / (hardware.hbm_gb_s * 1e9 * a.MEMORY_SHARE)


def reduce_gradients(job: RoleJob, stage: StageMemory, hardware: HardwareConfig, per_node: int) -> float:
    """Scattering the float32 gradients over the replicas and gathering the weights, as if nothing of it were hidden."""
    parallel, parameters = job.parallel, stage.parameters
    each, group = GRADIENT_BYTES + ELEMENT_BYTES[job.dtype], parallel.num_processes // parallel.pp
    link = find_link(hardware, per_node, group)
    speed = link.outside if link.share_outside else link.inside
    parts = zip(count_replicas(job), count_trained(job, parameters), strict=True)
    return sum(size * each * (number - 1) / number / speed for number, size in parts)


@functools.cache
def count_multiply_adds(arch: Architecture, with_value_head: bool) -> tuple[float, float, float]:
    """Of a forward pass: per token, per squared token of a sequence, per response token (megarl/mcore/row_costs.py)."""

    def count(length: int, response: int) -> float:
        row = Sequences(
            torch.zeros(length, dtype=torch.int64), torch.tensor([length]), torch.tensor([length - response])
        )
        return compute_row_costs(arch, row, with_value_head)[0]

    one, two = count(1, 0), count(2, 0)
    square = (two - 2 * one) / 2
    return one - square, square, count(1, 1) - one


def _share_of_mlp(arch: Architecture) -> float:
    """The MLP's or experts' share of a layer's matrix products."""
    per_token, _, _ = count_multiply_adds(arch, True)
    projections = arch.num_layers * 2 * arch.hidden_size * arch.head_size * (arch.num_heads + arch.num_kv_heads)
    return 1 - projections / per_token
