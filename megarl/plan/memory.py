"""Memory of a job in bytes: activations and model of each training process, servers, and each GPU by phase.

Activations are what one rank keeps of one micro-batch between its forward and its backward pass, after Korthikanti et
al. (2205.05198, section 4: what each operation saves, and which tensor- and sequence-parallel ranks hold it), for the
layers built here: RMSNorm, rotary positions, grouped queries, SwiGLU, no biases and no dropout. One table has those of
Transformer Engine (2.20, transformer_engine/pytorch: module/layernorm_linear.py, attention/rope.py, permutation.py,
attention/dot_product_attention/backends.py and context_parallel.py; megatron/core/fusions/fused_bias_swiglu.py), read
there and not measured; the other those of the CPU (megarl/cpu/layers.py; megatron/core/transformer/mlp.py,
attention.py, moe/experts.py), which tests/simulate.py counts.

Symbols: S tokens on this rank (of a context-parallel group its part), s = S / tp of them under sequence parallelism
(else S), h hidden size, d size of a head, H and K query and key heads of this rank, f rows of the MLP on this rank,
V columns of the vocabulary on this rank, R response tokens that it predicts, b bytes of an element, L longest sequence.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from megarl.config.placement import find_server_offload, list_groups, place, take_turns
from megarl.config.schema import roles as schema
from megarl.config.schema.root import SERVERS, Config, RolloutConfig, ServerOffload
from megarl.mcore.checkpoints import SENT_ELEMENTS, count_layer, padded_vocab_size
from megarl.mcore.spec import StageParameters
from megarl.models.architecture import Architecture
from megarl.sync.pieces import predict_server_rank

GIB = 1 << 30

PROCESS_GIB = 2.5
"""GPU memory per training process besides tensors: CUDA's context, NCCL's buffers, workspaces"""
ALLOCATOR_SHARE = 0.05
"""Share of a training process's peak tensor memory that torch's allocator loses to fragmentation"""
SERVER_GIB = 4.0
"""GPU memory per server rank besides weights and KV cache: context, NCCL, CUDA graphs, activations"""
HOST_PROCESS_GIB = 6.0
"""Host memory per process: Python, CUDA's and torch's libraries, buffers"""
ELEMENT_BYTES = {schema.Dtype.float32: 4, schema.Dtype.bfloat16: 2}
LOSS_BYTES = 48
"""Per response token: its target, log-prob, and what the loss keeps (int64 and float32 vectors)"""


@dataclass(frozen=True)
class MicroBatch:
    """The largest micro-batch, in tokens of one rank."""

    num_tokens: int
    num_response_tokens: int
    longest: int
    """Tokens of the longest sequence, over all context-parallel ranks"""


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer for one micro-batch."""

    input: int
    """s h b"""
    core_attention: int
    """Not kept with recompute_modules=[core_attn]"""
    mlp: int
    """Not kept with recompute_modules=[mlp]"""
    rest: int
    """Everything else, without the input"""
    gradient: int
    """Additional peak of the layer's backward pass, less what it has freed by then"""
    forward: int
    """Peak of a forward pass of its MLP or experts that keeps nothing"""

    @property
    def total(self) -> int:
        return self.input + self.core_attention + self.mlp + self.rest


@dataclass(frozen=True)
class HeadBytes:
    """Bytes of the last stage's head for one micro-batch."""

    saved: int
    gradient: int
    """Additional peak of its backward pass, less what it has freed by then"""
    forward: int
    """Peak of a forward pass that keeps nothing for a backward pass"""


def count_rows(arch: Architecture, on_gpu: bool | None) -> int:
    """How many times f numbers an MLP keeps of a token: both halves of linear_fc1 and their product, for linear_fc2;
    on a CPU silu of the one half too. Megatron's chain of operations, for other activations or with None, also keeps
    the other half plus its offset, and where it clamps the clamped half and its sigmoid.
    """
    if arch.activation == "silu" and on_gpu is not None:
        return 3 if on_gpu else 4
    return 5 if arch.clamp is None or on_gpu is None else 7


def compute_layer(
    arch: Architecture, parallel: schema.ParallelConfig, dtype: schema.Dtype, batch: MicroBatch, on_gpu: bool | None
) -> LayerBytes:
    """norm: s h b + 4 s of scales, once before attention and once before the MLP; their outputs as much; queries and
    keys, turned by their positions, and values; the output of attention and a float32 logsumexp for each token and head
    (2205.14135); `count_rows` times f of the MLP. Norms of queries and keys keep their inputs and scales, norms of the
    outputs and those within latent attention too. on_gpu: as `count_rows`.

    On a CPU values are a view of all that linear_qkv made, which stays with them, and the angles of each layer are
    kept; Transformer Engine copies the values, and the angles are one table for all layers.
    """
    b, h, tokens = ELEMENT_BYTES[dtype], arch.hidden_size, batch.num_tokens
    split = tokens // parallel.tp if parallel.sp else tokens
    heads, kv_heads = arch.num_heads // parallel.tp, max(1, arch.num_kv_heads // parallel.tp)
    queries, keys = tokens * heads * arch.head_size * b, tokens * kv_heads * arch.head_size * b
    norms = split * h * b + 2 * 4 * split + 2 * split * h * b
    if arch.output_norms:
        norms += 2 * (4 * split + split * h * b)
    if arch.latent is not None:
        norms += 2 * split * ((arch.latent.query_rank or 0) + arch.latent.rank) * b
    held = queries + keys + tokens * kv_heads * arch.value_size * b
    if not on_gpu or arch.latent is not None:
        held += queries + keys + 4 * tokens * arch.head_size * b
    if arch.qk_norm:
        held += queries + 4 * tokens * (heads + kv_heads) + (keys if on_gpu else 0)
    mlp, work, forward = _compute_mlp(arch, parallel, b, split, tokens, count_rows(arch, on_gpu))
    return LayerBytes(
        input=split * h * b,
        core_attention=4 * tokens * heads,
        mlp=mlp,
        rest=norms + held + tokens * heads * arch.value_size * b,
        # Under sequence parallelism a matrix's whole input is gathered again, in a buffer that stays, and its gradient
        # is whole before it is scattered (megatron/core/tensor_parallel/layers.py).
        gradient=work + 2 * split * h * b + (2 * tokens * h * b if parallel.sp else 0),
        forward=forward + 3 * split * h * b + (2 * tokens * h * b if parallel.sp else 0),
    )


def _compute_mlp(
    arch: Architecture, parallel: schema.ParallelConfig, b: int, split: int, tokens: int, each: int
) -> tuple[int, int, int]:
    """Bytes kept by the MLP or the experts, the additional peak of their backward pass, that of a forward pass alone.

    Where some layers have experts and others do not, each layer counts as the larger of both.
    """
    h = arch.hidden_size

    def compute_dense(size: int) -> tuple[int, int, int]:
        rows = size // parallel.tp
        # In the gradient of the activation the product is gone, those of both halves and one that passes are there.
        work = max(min(3, each - 1) * tokens, tokens + 2 * h) * rows * b
        return each * tokens * rows * b, work, 4 * tokens * rows * b

    dense = compute_dense(arch.ffn_size)
    if arch.experts is None:
        return dense
    experts = arch.experts
    # Each rank sends its s tokens top_k times; where the routes are balanced it receives as many. The ranks that share
    # an expert gather their tokens.
    routed, rows = split * experts.top_k * parallel.etp, experts.ffn_size // parallel.etp
    routes = split * (experts.num_experts * 5 + experts.top_k * 24)
    # Where the fused SwiGLU does not weight by the router itself, the product before that is kept too.
    kept = routed * h * b + (each + (each > 3)) * routed * rows * b + routes
    # Tokens sent, received and sorted, and outputs; without Transformer Engine of one expert at a time, then joined.
    copies, share = (4 * routed * h * b, 1) if each == 3 else (5 * routed * h * b, experts.num_experts // parallel.ep)
    # As much, but for what is kept, is there when a layer has been recomputed.
    work = max(routed * (h + rows) * b + 2 * rows * h * b, copies - routed * h * b)
    forward = copies + 4 * routed * rows * b // share + routes
    if experts.shared_ffn_size:
        kept += compute_dense(experts.shared_ffn_size)[0]
    if arch.has_unlike_layers:
        return max(kept, dense[0]), max(work, dense[1]), max(forward, dense[2])
    return kept, work, forward


FP8_BYTES = 2
"""Per parameter of a linear layer that computes in FP8: Transformer Engine casts the weight at the first micro-batch
and keeps it, and its transpose for the backward pass (transformer_engine/pytorch/module/linear.py, is_first_microbatch;
module/base.py, get_weight_workspace; megatron/core/extensions/transformer_engine.py).
"""
GRADIENT_BYTES = 4
"""Per parameter: Megatron sums gradients in float32 (grad_reduce_in_fp32)"""
CHUNK_BYTES = {True: 3 * 4 * (1 << 23), False: 4 * (1 << 18)}
"""The float32 buffers of log-probs, on a GPU or not (megarl/mcore/logprobs.py)"""
DEFAULT_MODULES = ("core_attn",)
"""Modules that Megatron recomputes under recompute=selective (transformer_config.py, recompute_modules)"""


def uses_fp8(node: schema.TrainedRoleConfig | schema.ReferenceConfig) -> bool:
    return isinstance(node, schema.TrainedRoleConfig) and node.fp8 is not None


@dataclass(frozen=True)
class RoleJob:
    """One role, with what its memory depends on."""

    name: str
    node: schema.TrainedRoleConfig | schema.ReferenceConfig
    arch: Architecture
    batch: MicroBatch
    num_microbatches: int
    """Per minibatch, on each data-parallel rank"""
    on_gpu: bool = True
    holds_reference: bool = False
    """With a KL of estimator full the policy's processes hold the reference too"""
    caches_fp8: bool = False
    """FP8 copies of the weights stay from one micro-batch to the next"""
    modules: Sequence[str] = DEFAULT_MODULES

    @property
    def parallel(self) -> schema.ParallelConfig:
        return self.node.parallel

    @property
    def dtype(self) -> schema.Dtype:
        return self.node.dtype

    @property
    def is_trained(self) -> bool:
        return isinstance(self.node, schema.TrainedRoleConfig)

    @property
    def has_value_head(self) -> bool:
        return isinstance(self.node, schema.CriticConfig)


def compute_head(job: RoleJob) -> HeadBytes:
    """The last norm, the hidden states that predict, and logits [R, V] or values [R].

    The backward pass holds the logits' gradient beside them, then, the logits freed, the gradients of the hidden states
    and of the output weights.
    """
    arch, tp, batch = job.arch, job.parallel.tp, job.batch
    b, h, response = ELEMENT_BYTES[job.dtype], arch.hidden_size, batch.num_response_tokens
    split = batch.num_tokens // tp if job.parallel.sp else batch.num_tokens
    norm = split * h * b + 4 * split
    if job.has_value_head:
        hidden = response * h * 4
        saved = norm + hidden + response * LOSS_BYTES
        return HeadBytes(saved, gradient=hidden + response * h * b, forward=hidden + response * h * b)
    columns, chunk_bytes = padded_vocab_size(arch.vocab_size, tp) // tp, CHUNK_BYTES[job.on_gpu]
    hidden, logits = response * h * b, response * columns * b
    saved = norm + hidden + logits + response * LOSS_BYTES
    gradient = max(logits + chunk_bytes, hidden + columns * h * b)
    return HeadBytes(saved, gradient, forward=hidden + logits + chunk_bytes)


def sum_layers(
    layer: LayerBytes,
    num_layers: int,
    node: schema.TrainedRoleConfig,
    modules: Sequence[str] = DEFAULT_MODULES,
    num_pieces: int = 1,
) -> tuple[int, int]:
    """Bytes kept of one micro-batch by the layers of a stage, and bytes recomputed at once, of one block of layers.

    Under recompute=full only the input of each block is kept (2205.05198, section 5). num_pieces: virtual pipeline
    stages; Megatron cuts each of them into blocks of its own (megatron/core/transformer/transformer_block.py,
    _checkpointed_forward). modules: recomputed under recompute=selective; those that are not known here count as kept.
    """
    if node.recompute is schema.Recompute.full:
        pieces = [num_layers // num_pieces + (piece < num_layers % num_pieces) for piece in range(num_pieces)]
        if node.recompute_method is schema.RecomputeMethod.block:
            # The first layers of a piece are recomputed, one at a time; the others have freed their activations then.
            again = [min(node.recompute_num_layers, piece) for piece in pieces]
            keeping = [piece - number for piece, number in zip(pieces, again, strict=True)]
            kept = sum(again) * layer.input + sum(keeping) * layer.total
            return kept, max(0, *(layer.total - layer.input - number * layer.total for number in keeping))
        blocks = sum(-(-piece // node.recompute_num_layers) for piece in pieces)
        return blocks * layer.input, min(node.recompute_num_layers, max(pieces)) * layer.total - layer.input
    dropped = 0
    if node.recompute is schema.Recompute.selective:
        dropped += layer.core_attention if "core_attn" in modules else 0
        dropped += layer.mlp if "mlp" in modules else 0
    return num_layers * (layer.total - dropped), dropped


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
    sent: int
    """The buffer of a save or a load, through which the optimizer's state goes to the host or comes back"""

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
        return self.weights + self.fp8 + self.gradients + self.optimizer + self.sent

    @property
    def peak(self) -> int:
        return max(self.update, self.forward, self.building, self.checkpoint)


def estimate_stages(job: RoleJob, stages: tuple[StageParameters, ...]) -> tuple[StageMemory, ...]:
    return tuple(_estimate_stage(job, parameters, number) for number, parameters in enumerate(stages))


def count_in_flight(parallel: schema.ParallelConfig, stage: int, num_microbatches: int) -> float:
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
    layer = compute_layer(job.arch, parallel, job.dtype, job.batch, job.on_gpu)
    in_flight = count_in_flight(parallel, stage, job.num_microbatches)
    kept, again = 0, 0
    if isinstance(job.node, schema.TrainedRoleConfig):
        kept, again = sum_layers(layer, parameters.num_layers, job.node, job.modules, parallel.vpp)
    is_last = stage == parallel.pp - 1
    # All stages but the last keep what they sent until its gradient arrives.
    activations = ceil(in_flight * (kept + (0 if is_last else layer.input)))
    head = compute_head(job) if is_last else HeadBytes(0, 0, 0)
    # The peak is in the head's backward pass or, after it, in that of a layer.
    work = max(again + layer.gradient - head.saved, head.gradient)
    # The optimizer's state is there from the start (megarl/mcore/optimizer.py).
    copies = max(sum(trained) * b, optimizer)
    # Gradients are dropped, not moved.
    offload = job.node.offload
    moved = 0 if offload is None else optimizer + (weights if offload is schema.Offload.all else 0)
    dropped = 0 if offload is None else gradients
    return StageMemory(
        parameters=parameters,
        in_flight=ceil(in_flight),
        weights=weights,
        fp8=fp8,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations if job.is_trained else 0,
        head=head.saved if job.is_trained else 0,
        work=work if job.is_trained else 0,
        forward_work=max(layer.forward, head.forward) + (head.forward if job.holds_reference else 0),
        resident=weights + (0 if offload else fp8) + gradients + optimizer - moved - dropped,
        offloaded=moved,
        building=weights + gradients + (copies if job.is_trained else 0),
        sent=compute_sent(job, parameters) if job.is_trained else 0,
    )


def count_trained(job: RoleJob, parameters: StageParameters) -> tuple[int, int]:
    """The parameters of a rank that are trained: dense ones and those of experts."""
    if not job.is_trained:
        return 0, 0
    if adapters := count_adapters(job, parameters):
        return adapters + (parameters.head if job.has_value_head else 0), 0
    if isinstance(job.node, schema.CriticConfig) and job.node.trainable is schema.Trainable.mlp:
        return parameters.mlp + parameters.head, parameters.experts
    return parameters.dense, parameters.experts


def count_adapters(job: RoleJob, parameters: StageParameters) -> int:
    """The parameters of a rank's adapters."""
    lora = job.node.lora if isinstance(job.node, schema.TrainedRoleConfig) else None
    return parameters.num_layers * count_layer(job.arch, lora, job.parallel.tp) if lora and lora.rank else 0


def count_replicas(job: RoleJob) -> tuple[int, int]:
    """Over how many ranks the optimizer's state is sharded: that of dense parameters and that of experts."""
    parallel = job.parallel
    experts = parallel.num_processes // (parallel.pp * parallel.ep * parallel.etp)
    return parallel.dp * parallel.cp, max(1, experts)


def compute_sent(job: RoleJob, parameters: StageParameters) -> int:
    """The float32 buffer through which a save or a load sends the optimizer's state, SENT_ELEMENTS at a time
    (megarl/mcore/checkpoints.py).
    """
    return 4 * min(max(count_trained(job, parameters)), SENT_ELEMENTS)


def compute_saved(job: RoleJob, parameters: StageParameters, rank: int) -> int:
    """Host memory of a rank for a checkpoint until it is written: its part of the optimizer's float32 weights and two
    moments, which data-parallel ranks share; on the first of these the weights.

    rank: within its stage, whose ranks Megatron orders by tp, cp and dp, those with experts by etp, ep and dp
    (megatron/core/parallel_state.py, RankGenerator).
    """
    parallel, each = job.parallel, ELEMENT_BYTES[job.dtype]
    (dense, experts), (replicas, expert_replicas) = count_trained(job, parameters), count_replicas(job)
    saved = 12 * (ceil(dense / replicas) + ceil(experts / expert_replicas))
    saved += each * (parameters.dense + count_adapters(job, parameters)) if rank < parallel.tp else 0
    return saved + (each * parameters.experts if rank < parallel.etp * parallel.ep else 0)


def compute_optimizer(job: RoleJob, parameters: StageParameters) -> int:
    """Adam's two float32 moments and, for bfloat16 weights, a float32 copy, sharded over the data-parallel ranks: over
    dp x cp of them (Rajbhandari et al. 1910.02054, section 5.1, P_os; megatron/core/optimizer/distrib_optimizer.py),
    of experts over those that hold the same ones.
    """
    each = 8 if job.dtype is schema.Dtype.float32 else 12
    (dense, experts), (replicas, expert_replicas) = count_trained(job, parameters), count_replicas(job)
    return ceil(each * dense / replicas) + ceil(each * experts / expert_replicas)


DEFAULT_FRACTION = 0.83
"""SGLang's default on a GPU of 80 GB without graphs of prefill, where rollout.sglang.mem_fraction_static is not set
(arg_groups/memory_hook.py: 13.6 GiB are kept free)"""


@dataclass(frozen=True)
class ServerMemory:
    weights: int
    kv_cache: int
    """Bytes; 0 or less: there is no memory for it"""
    kv_tokens: int
    """Tokens of one server, of which each rank has its own heads"""
    bytes_per_token: int
    """Bytes of KV cache per token, on each rank"""
    num_longest: int
    """Number of sequences of full length that fit at once"""
    fraction: float
    """mem_fraction_static"""
    reserve: int
    """Bytes that the fraction leaves free for everything else"""

    @property
    def total(self) -> int:
        return self.weights + max(0, self.kv_cache) + int(SERVER_GIB * GIB)

    def compute_rest(self, offload: ServerOffload | None) -> int:
        """Bytes that stay while roles compute: CUDA's context, NCCL's buffers and CUDA graphs are never given back."""
        given = {None: 0, ServerOffload.kv_cache: max(0, self.kv_cache), ServerOffload.all: self.total}[offload]
        return max(int(SERVER_GIB * GIB), self.total - given)

    def compute_loading(self, offload: ServerOffload | None) -> int:
        """Bytes in a weight sync: the KV cache comes back after it."""
        return self.total if offload is None else self.compute_rest(ServerOffload.kv_cache)


@functools.cache
def compute_server_weights(arch: Architecture, tp: int, dtype: schema.Dtype) -> int:
    """Bytes of the weights on one rank, without padding rows of the vocabulary; each rank holds as much as rank 0."""
    return sum(piece.region.size for piece in predict_server_rank(arch, tp, 0)) * ELEMENT_BYTES[dtype]


def estimate_server(arch: Architecture, rollout: RolloutConfig, weights: int, free: int, longest: int) -> ServerMemory:
    """free: bytes of the GPU before the server starts. longest: tokens of the longest sequence.

    SGLang's pool takes what the weights leave free, less (1 - mem_fraction_static) of what was free before them
    (mem_cache/kv_cache_configurator.py, _profile_available_bytes): mem_fraction_static * free - weights. A token
    takes 2 * layers * key-value heads of this rank * size of a head elements, at least one head a rank; with latent
    attention its vector and what positions turn, on every rank.
    """
    heads = max(1, arch.num_kv_heads // rollout.tp)
    dtype, each = str(rollout.sglang.get("kv_cache_dtype") or "auto"), ELEMENT_BYTES[rollout.dtype]
    if dtype != "auto":
        each = 1 if dtype.startswith("fp8") else 2 if dtype in ("bfloat16", "bf16") else each
    size = 2 * heads * arch.head_size if arch.latent is None else arch.latent.rank + arch.latent.turned_size
    per_token = arch.num_layers * size * each
    fraction = float(rollout.sglang.get("mem_fraction_static") or DEFAULT_FRACTION)
    room = int(fraction * free) - weights
    if rollout.kv_cache_tokens is not None:
        room = min(room, rollout.kv_cache_tokens * per_token)
    tokens = max(0, room) // per_token
    return ServerMemory(weights, room, tokens, per_token, tokens // longest, fraction, int((1 - fraction) * free))


PHASES = ("generation", "sync", "log-probs, values", "update", "checkpoint")


@dataclass(frozen=True)
class GpuPlan:
    """GPUs with the same processes."""

    gpus: tuple[int, ...]
    """Their numbers, from 0 on the first node"""
    stages: Mapping[str, int]
    """The pipeline stage of each role that has a process there"""
    server: ServerMemory | None
    """The rank of a server there"""
    phases: Mapping[str, int]
    """Bytes, by PHASES"""


def place_job(config: Config) -> dict[str, tuple[int, ...]]:
    """The GPU of every rank of each role and of the servers, in the order policy, critic, reference, servers.

    Numbers beyond the cluster's mean that the job needs more GPUs than it has. cluster.gpus_per_node must be known.
    """
    per_node = config.cluster.gpus_per_node
    return {
        name: tuple(slot.node * per_node + gpu for slot in slots for gpu in slot.gpus)
        for name, slots in place(config.cluster, list_groups(config)).items()
    }


def plan_gpus(
    config: Config,
    jobs: Mapping[str, RoleJob],
    stages: Mapping[str, Sequence[StageMemory]],
    places: Mapping[str, Sequence[int]],
    start_server: Callable[[int], ServerMemory],
) -> tuple[GpuPlan, ...]:
    """The GPUs that are used, grouped by their processes.

    places: as `place_job`. start_server: with the bytes that are free when a server starts.
    """
    tenants: dict[int, dict[str, int]] = {}
    for role, job in jobs.items():
        per_stage = job.parallel.num_processes // job.parallel.pp
        for rank, gpu in enumerate(places[role]):
            tenants.setdefault(gpu, {})[role] = rank // per_stage
    served = set(places[SERVERS])
    kinds: dict[tuple[tuple[tuple[str, int], ...], bool], list[int]] = {}
    for gpu in sorted(tenants.keys() | served):
        kinds.setdefault((tuple(tenants.get(gpu, {}).items()), gpu in served), []).append(gpu)
    gpu_bytes = int(config.cluster.hardware.memory_gib * GIB)
    sharing = (take_turns(config), find_server_offload(config))
    found = []
    for (processes, has_server), gpus in kinds.items():
        memories = {role: stages[role][stage] for role, stage in processes}
        # The training processes hold their models then.
        taken = sum(add_overhead(memory.resident) for memory in memories.values())
        server = start_server(max(0, gpu_bytes - taken)) if has_server else None
        phases = compute_phases(memories, jobs, server, config.rollout.sync_bucket_mb << 20, *sharing)
        found.append(GpuPlan(tuple(gpus), dict(processes), server, phases))
    return tuple(found)


def compute_phases(
    memories: Mapping[str, StageMemory],
    jobs: Mapping[str, RoleJob],
    server: ServerMemory | None,
    bucket_bytes: int,
    takes_turns: bool,
    offload: ServerOffload | None,
) -> dict[str, int]:
    """Bytes of one GPU in each phase, by PHASES. Roles that share it compute in parallel, or take turns.

    memories: of the roles' processes there. bucket_bytes: rollout.sync_bucket_mb; a rank of a sync holds at most two
    messages. takes_turns: megarl/cluster/actors.py. offload: what the server has given back while roles compute
    (megarl/rollout/client.py).
    """
    is_shared = server is not None or len(memories) > 1
    held, scoring, updating, saving, sending = [], [], [], [], []
    for role, memory in memories.items():
        # torch's allocator keeps the peak of the calls, which others on the GPU cannot use; where something is
        # offloaded, it releases that memory (megarl/mcore/optimizer.py).
        least = memory.peak if is_shared and jobs[role].node.offload is None else memory.resident
        held.append(add_overhead(least))
        sending.append(add_overhead(max(least, memory.weights) + 2 * bucket_bytes if role == "policy" else least))
        scoring.append(add_overhead(max(least, memory.forward)))
        # The model was built before the first update, and the allocator keeps what that took.
        updating.append(add_overhead(max(least, memory.update, memory.building)))
        saving.append(add_overhead(max(least, memory.checkpoint)))

    def join(working: Sequence[int]) -> int:
        """Bytes of all roles on the GPU at their peak, beside what the server keeps."""
        away = server.compute_rest(offload) if server else 0
        if not takes_turns:
            return sum(working) + away
        return sum(held) + max((work - least for work, least in zip(working, held, strict=True)), default=0) + away

    return {
        "generation": sum(held) + (server.total if server else 0),
        "sync": sum(sending) + (server.compute_loading(offload) + 2 * bucket_bytes if server else 0),
        "log-probs, values": join(scoring),
        "update": join(updating),
        "checkpoint": join(saving),
    }


def add_overhead(tensors: int) -> int:
    return int(tensors * (1 + ALLOCATOR_SHARE) + PROCESS_GIB * GIB)
