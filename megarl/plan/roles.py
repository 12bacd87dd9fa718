"""Memory of the training processes: weights, gradients, optimizer and activations of each pipeline stage, in bytes."""

from dataclasses import dataclass
from math import ceil

from megarl.config.schema.roles import Dtype, LoraConfig, Offload, ParallelConfig, Trainable
from megarl.mcore.model.architecture import Architecture
from megarl.mcore.weights.adapters import count_layer
from megarl.mcore.weights.dist_format import GATHERED_ELEMENTS
from megarl.mcore.worker_spec import StageParameters
from megarl.plan.activations import (
    ELEMENT_BYTES,
    MicroBatch,
    Saving,
    choose_attention,
    compute_head,
    compute_layer,
    sum_layers,
)

FP8_BYTES = 2
"""Per parameter of a linear layer that computes in FP8: Transformer Engine casts the weight at the first micro-batch
and keeps it, and its transpose for the backward pass (transformer_engine/pytorch/module/linear.py, is_first_microbatch;
module/base.py, get_weight_workspace; megatron/core/extensions/transformer_engine.py).
"""
GRADIENT_BYTES = 4
"""Per parameter: Megatron sums gradients in float32 (grad_reduce_in_fp32)"""
CHUNK_BYTES = {True: 3 * 4 * (1 << 23), False: 4 * (1 << 18)}
"""The float32 buffers of log-probs, on a GPU or not (megarl/mcore/logprobs.py)"""


@dataclass(frozen=True)
class RoleJob:
    """One role, with what its memory depends on."""

    name: str
    arch: Architecture
    parallel: ParallelConfig
    dtype: Dtype
    is_trained: bool
    has_value_head: bool
    holds_reference: bool
    """With a KL of estimator full the policy's processes hold the reference too"""
    offload: Offload | None
    saving: Saving
    batch: MicroBatch
    num_microbatches: int
    """Per minibatch, on each data-parallel rank"""
    on_gpu: bool
    fp8: bool = False
    caches_fp8: bool = False
    """FP8 copies of the weights stay from one micro-batch to the next"""
    trainable: Trainable = Trainable.all
    """Which weights have gradients and an optimizer's state"""
    lora: LoraConfig | None = None
    """Adapters that have them in place of all weights"""


@dataclass(frozen=True)
class StageMemory:
    """Memory of one rank of a pipeline stage, in bytes."""

    parameters: StageParameters
    in_flight: int
    """Number of micro-batches whose activations are held at once"""
    weights: int
    fp8: int
    """Copies of the weights in FP8, and their transposes; with `offload` they are dropped between the calls"""
    gradients: int
    optimizer: int
    activations: int
    """Kept for pending backward passes, without logits"""
    head: int
    """Logits or values, with their inputs and gradients"""
    work: int
    """Additional memory at the peak: recomputed layers, gradients of activations"""
    forward_work: int
    """The same for a forward pass alone: log-probs and values"""
    resident: int
    """Between the calls"""
    offloaded: int
    """Held in host memory between the calls"""
    building: int
    """While the model is built: gradients, and the weights twice or the optimizer's state"""
    gathered: int
    """Buffers of a save, through which the optimizer's state goes to the host"""

    @property
    def update(self) -> int:
        """The peak of an update; for a role that is not trained, that of a forward pass."""
        if self.gradients == 0:
            return self.forward
        model = self.weights + self.fp8 + self.gradients + self.optimizer
        return model + self.activations + self.head + self.work

    @property
    def forward(self) -> int:
        """The peak of log-probs or values."""
        return max(self.resident, self.weights + self.fp8) + self.forward_work

    @property
    def checkpoint(self) -> int:
        """The peak of a save; what is offloaded is brought back for it."""
        return self.weights + self.fp8 + self.gradients + self.optimizer + self.gathered

    @property
    def peak(self) -> int:
        return max(self.update, self.forward, self.building, self.checkpoint)


def estimate_stages(job: RoleJob, stages: tuple[StageParameters, ...]) -> tuple[StageMemory, ...]:
    return tuple(_estimate_stage(job, parameters, number) for number, parameters in enumerate(stages))


def count_in_flight(parallel: ParallelConfig, stage: int, num_microbatches: int) -> float:
    """The maximum number of micro-batches of which a stage holds the activations of all its layers.

    1F1B: pp - stage (Narayanan et al. 2104.04473, section 2.2.1). Interleaved: a stage warms up with
    2 (pp - stage - 1) + (vpp - 1) pp pieces and has one more in progress, each 1 / vpp of its layers
    (megatron/core/pipeline_parallel/schedules.py, get_pp_rank_microbatches).
    """
    if parallel.pp == 1:
        return 1
    if parallel.vpp == 1:
        return min(parallel.pp - stage, num_microbatches)
    pieces = 2 * (parallel.pp - stage - 1) + (parallel.vpp - 1) * parallel.pp + 1
    return min(pieces, num_microbatches * parallel.vpp) / parallel.vpp


def _estimate_stage(job: RoleJob, parameters: StageParameters, stage: int) -> StageMemory:
    parallel, b = job.parallel, ELEMENT_BYTES[job.dtype]
    weights = (parameters.total * (2 if job.holds_reference else 1) + count_adapters(job, parameters)) * b
    fp8 = (parameters.total - parameters.embedding - parameters.head) * FP8_BYTES if job.caches_fp8 else 0
    trained = count_trained(job, parameters)
    gradients = sum(trained) * GRADIENT_BYTES
    optimizer = compute_optimizer(job, parameters) if job.is_trained else 0
    attention = choose_attention(job.dtype, job.batch.longest, job.on_gpu)
    layer = compute_layer(job.arch, parallel, job.dtype, job.batch, attention)
    in_flight = count_in_flight(parallel, stage, job.num_microbatches)
    kept, again = sum_layers(layer, parameters.num_layers, job.saving, parallel.vpp)
    is_last = stage == parallel.pp - 1
    # All stages but the last keep what they sent until its gradient arrives.
    activations = ceil(in_flight * (kept + (0 if is_last else layer.input)))
    head = None
    if is_last:
        chunk = CHUNK_BYTES[job.on_gpu]
        head = compute_head(job.arch, parallel, job.dtype, job.batch, job.has_value_head, chunk)
    in_layers = again + layer.gradient
    in_head = head.saved + head.gradient if head else 0
    # The peak is in the head's backward pass or, after it, in that of a layer.
    work = max(in_layers - (head.saved if head else 0), in_head - (head.saved if head else 0), 0)
    # The optimizer's state is there from the start (megarl/mcore/distributed_optimizer.py).
    copies = max(sum(trained) * b, optimizer)
    moved = _list_offloaded(job.offload, weights, gradients, optimizer)
    return StageMemory(
        parameters=parameters,
        in_flight=ceil(in_flight),
        weights=weights,
        fp8=fp8,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations if job.is_trained else 0,
        head=head.saved if head and job.is_trained else 0,
        work=work if job.is_trained else 0,
        forward_work=max(layer.mlp + 3 * layer.input, head.forward if head else 0)
        + (head.forward if head and job.holds_reference else 0),
        resident=weights + (0 if job.offload else fp8) + gradients + optimizer - sum(moved),
        # Gradients are dropped, not moved.
        offloaded=moved[0] + moved[2],
        building=weights + gradients + (copies if job.is_trained else 0),
        gathered=compute_gathered(job, parameters) if job.is_trained else 0,
    )


def count_trained(job: RoleJob, parameters: StageParameters) -> tuple[int, int]:
    """The parameters of a rank that are trained: dense ones and those of experts."""
    if not job.is_trained:
        return 0, 0
    if job.lora is not None:
        return count_adapters(job, parameters), 0
    if job.trainable is Trainable.mlp:
        return parameters.mlp + parameters.head, parameters.experts
    return parameters.dense, parameters.experts


def count_adapters(job: RoleJob, parameters: StageParameters) -> int:
    """The parameters of a rank's adapters."""
    return 0 if job.lora is None else parameters.num_layers * count_layer(job.arch, job.lora, job.parallel.tp)


def count_replicas(job: RoleJob) -> tuple[int, int]:
    """Over how many ranks the optimizer's state is sharded: that of dense parameters and that of experts."""
    parallel = job.parallel
    experts = parallel.num_processes // (parallel.pp * parallel.ep * parallel.etp)
    return parallel.dp * parallel.cp, max(1, experts)


def compute_gathered(job: RoleJob, parameters: StageParameters) -> int:
    """Float32 buffers of the data-parallel rank that gathers: its own piece, and those of all, which are at most
    GATHERED_ELEMENTS (megarl/mcore/distributed_optimizer.py).
    """
    sizes = []
    for count, replicas in zip(count_trained(job, parameters), count_replicas(job), strict=True):
        elements = min(count, GATHERED_ELEMENTS)
        sizes.append(elements if replicas == 1 else elements + ceil(elements / replicas))
    return 4 * max(sizes)


def compute_saved(job: RoleJob, parameters: StageParameters, rank: int) -> int:
    """Host memory of a rank for a checkpoint until it is written: weights, and in float32 the optimizer's copy of them
    and two moments, on the first data-parallel rank, which writes those of all; 0 on the others.

    rank: within its stage, whose ranks Megatron orders by tp, cp and dp, those with experts by etp, ep and dp
    (megatron/core/parallel_state.py, RankGenerator).
    """
    parallel, each = job.parallel, ELEMENT_BYTES[job.dtype]
    dense, experts = count_trained(job, parameters)
    saved = each * (parameters.dense + count_adapters(job, parameters)) + 12 * dense if rank < parallel.tp else 0
    return saved + ((each * parameters.experts + 12 * experts) if rank < parallel.etp * parallel.ep else 0)


def compute_optimizer(job: RoleJob, parameters: StageParameters) -> int:
    """Adam's two float32 moments and, for bfloat16 weights, a float32 copy, sharded over the data-parallel ranks: over
    dp x cp of them (Rajbhandari et al. 1910.02054, section 5.1, P_os; megatron/core/optimizer/distrib_optimizer.py),
    of experts over those that hold the same ones.
    """
    each = 8 if job.dtype is Dtype.float32 else 12
    (dense, experts), (replicas, expert_replicas) = count_trained(job, parameters), count_replicas(job)
    return ceil(each * dense / replicas) + ceil(each * experts / expert_replicas)


def _list_offloaded(offload: Offload | None, weights: int, gradients: int, optimizer: int) -> tuple[int, int, int]:
    if offload is None:
        return 0, 0, 0
    return (weights if offload is Offload.all else 0), gradients, optimizer
