"""Bytes that one rank keeps of one micro-batch between its forward and its backward pass.

After Korthikanti et al. (2205.05198, section 4: what each operation saves, and which tensor- and sequence-parallel
ranks hold it), for the layers built here: RMSNorm, rotary positions, grouped queries, SwiGLU, no biases and no
dropout, and for Megatron's own operations where they are not fused (megatron/core/transformer/mlp.py,
attention.py, moe/experts.py; megarl/mcore/model/layers.py, logprobs.py).

Symbols: S tokens on this rank (of a context-parallel group its part), s = S / tp of them under sequence parallelism
(else S), h hidden size, d size of a head, H and K query and key heads of this rank, f rows of the MLP on this rank,
V columns of the vocabulary on this rank, R response tokens that it predicts, b bytes of an element, L longest sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from megarl.config.schema.roles import Dtype, ParallelConfig, Recompute, RecomputeMethod
from megarl.mcore.model.architecture import Architecture
from megarl.mcore.weights.entries import padded_vocab_size

ELEMENT_BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2}
LOSS_BYTES = 48
"""Per response token: its target, log-prob, and what the loss keeps (int64 and float32 vectors)"""
DENSE_WIDTH = 256
"""On a CPU attention scores of sequences up to this length are held in bfloat16 (megarl/mcore/cpu/segments.py)"""


class Attention(Enum):
    flash = "flash"
    """2205.14135: inputs, output, and a float32 logsumexp for each token and head"""
    scores = "scores"
    """The full matrix of attention probabilities"""


@dataclass(frozen=True)
class MicroBatch:
    """The largest micro-batch, in tokens of one rank."""

    num_tokens: int
    num_response_tokens: int
    longest: int
    """Tokens of the longest sequence, over all context-parallel ranks"""


@dataclass(frozen=True)
class Saving:
    """The settings of activation recomputation, as policy.recompute."""

    recompute: Recompute = Recompute.none
    method: RecomputeMethod = RecomputeMethod.uniform
    num_layers: int = 1
    modules: tuple[str, ...] = ("core_attn",)
    """Modules that recompute=selective recomputes; those that are not known here count as kept"""


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


def choose_attention(dtype: Dtype, longest: int, on_gpu: bool) -> Attention:
    dense = not on_gpu and dtype is Dtype.bfloat16 and longest <= DENSE_WIDTH
    return Attention.scores if dense else Attention.flash


def compute_layer(
    arch: Architecture, parallel: ParallelConfig, dtype: Dtype, batch: MicroBatch, attention: Attention
) -> LayerBytes:
    """norm: s h b + 4 s of scales, once before attention and once before the MLP; their outputs as much; queries, keys
    and values once as made and, turned by their positions, once more; the output of attention; 5 f of the MLP: the
    two halves of linear_fc1, silu of one, the other plus its offset, their product. Norms of the outputs keep their
    inputs and scales.
    """
    b, h, tokens = ELEMENT_BYTES[dtype], arch.hidden_size, batch.num_tokens
    split = tokens // parallel.tp if parallel.sp else tokens
    heads, kv_heads = arch.num_heads // parallel.tp, max(1, arch.num_kv_heads // parallel.tp)
    queries, keys = tokens * heads * arch.head_size * b, tokens * kv_heads * arch.head_size * b
    norms = split * h * b + 2 * 4 * split + 2 * split * h * b
    if arch.output_norms:
        norms += 2 * (4 * split + split * h * b)
    held = queries + 2 * keys
    turned = queries + keys
    angles = 4 * tokens * arch.head_size * b
    if arch.qk_norm:
        held += queries + 4 * tokens * (heads + kv_heads)
    if attention is Attention.flash:
        core = 4 * tokens * heads
    else:
        core = tokens * heads * batch.longest * b
        # Values are copied for the product, so that nothing keeps the output of linear_qkv.
        held = held + keys if arch.qk_norm else keys
    mlp, work = _compute_mlp(arch, parallel, b, split, tokens)
    return LayerBytes(
        input=split * h * b,
        core_attention=core,
        mlp=mlp,
        rest=norms + held + turned + angles + queries,
        # Under sequence parallelism a matrix's whole input is gathered again, in a buffer that stays, and its gradient
        # is whole before it is scattered (megatron/core/tensor_parallel/layers.py).
        gradient=work + 2 * split * h * b + (2 * tokens * h * b if parallel.sp else 0),
    )


def _compute_mlp(arch: Architecture, parallel: ParallelConfig, b: int, split: int, tokens: int) -> tuple[int, int]:
    """Bytes kept by the MLP or the experts, and the additional peak of their backward pass.

    Where some layers have experts and others do not, each layer counts as the larger of both.
    """
    h = arch.hidden_size

    def compute_dense(size: int) -> tuple[int, int]:
        rows = size // parallel.tp
        return 5 * tokens * rows * b, tokens * rows * b + 2 * rows * h * b

    dense = compute_dense(arch.ffn_size)
    if arch.experts is None:
        return dense
    experts = arch.experts
    # Each rank sends its s tokens top_k times; where the routes are balanced it receives as many. The ranks that share
    # an expert gather their tokens.
    routed, rows = split * experts.top_k * parallel.etp, experts.ffn_size // parallel.etp
    routes = split * (experts.num_experts * 5 + experts.top_k * 24)
    # One half more than a dense MLP keeps: its output before it is weighted by the router.
    kept = routed * h * b + 6 * routed * rows * b + routes
    work = routed * (h + rows) * b + 2 * rows * h * b
    if experts.shared_ffn_size:
        kept += compute_dense(experts.shared_ffn_size)[0]
    if arch.has_unlike_layers:
        return max(kept, dense[0]), max(work, dense[1])
    return kept, work


def compute_head(
    arch: Architecture,
    parallel: ParallelConfig,
    dtype: Dtype,
    batch: MicroBatch,
    with_value_head: bool,
    chunk_bytes: int,
) -> HeadBytes:
    """The last norm, the hidden states that predict, and logits [R, V] or values [R].

    The backward pass holds the logits' gradient beside them, then, the logits freed, the gradients of the hidden states
    and of the output weights. chunk_bytes: of the float32 buffers of log-probs.
    """
    b, h, response = ELEMENT_BYTES[dtype], arch.hidden_size, batch.num_response_tokens
    split = batch.num_tokens // parallel.tp if parallel.sp else batch.num_tokens
    norm = split * h * b + 4 * split
    if with_value_head:
        hidden = response * h * 4
        saved = norm + hidden + response * LOSS_BYTES
        return HeadBytes(saved, gradient=hidden + response * h * b, forward=hidden + response * h * b)
    columns = padded_vocab_size(arch.vocab_size, parallel.tp) // parallel.tp
    hidden, logits = response * h * b, response * columns * b
    saved = norm + hidden + logits + response * LOSS_BYTES
    gradient = max(logits + chunk_bytes, hidden + columns * h * b)
    return HeadBytes(saved, gradient, forward=hidden + logits + chunk_bytes)


def sum_layers(layer: LayerBytes, num_layers: int, saving: Saving, num_pieces: int = 1) -> tuple[int, int]:
    """Bytes kept of one micro-batch by the layers of a stage, and bytes recomputed at once, of one block of layers.

    Under recompute=full only the input of each block is kept (2205.05198, section 5). num_pieces: virtual pipeline
    stages; Megatron cuts each of them into blocks of its own (megatron/core/transformer/transformer_block.py,
    _checkpointed_forward).
    """
    if saving.recompute is Recompute.full:
        pieces = [num_layers // num_pieces + (piece < num_layers % num_pieces) for piece in range(num_pieces)]
        if saving.method is RecomputeMethod.block:
            return _sum_blocks(layer, pieces, saving.num_layers)
        blocks = sum(-(-piece // saving.num_layers) for piece in pieces)
        return blocks * layer.input, min(saving.num_layers, max(pieces)) * layer.total - layer.input
    dropped = 0
    if saving.recompute is Recompute.selective:
        dropped += layer.core_attention if "core_attn" in saving.modules else 0
        dropped += layer.mlp if "mlp" in saving.modules else 0
    return num_layers * (layer.total - dropped), dropped


def _sum_blocks(layer: LayerBytes, pieces: Sequence[int], num_recomputed: int) -> tuple[int, int]:
    """As `sum_layers`, where the first layers of each piece are recomputed, one at a time.

    The layers that keep their activations come last in a piece; they have freed them when the others are recomputed.
    """
    again = [min(num_recomputed, piece) for piece in pieces]
    keeping = [piece - number for piece, number in zip(pieces, again, strict=True)]
    kept = sum(again) * layer.input + sum(keeping) * layer.total
    return kept, max(0, *(layer.total - layer.input - number * layer.total for number in keeping))
