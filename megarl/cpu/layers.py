"""The layers of a model where there is no Transformer Engine: plain torch, fast on a CPU.

RMSNorm, SwiGLU, and causal attention over packed sequences, which are computed in dense rectangles: right-padded rows
under a causal mask need no padding mask, since a real token never sees the padding to its right.

Shapes: S packed tokens of all ranks, s those of this one, n sequences of a rectangle, L its width, H query heads,
K key heads, D size of a head.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn import functional as F

from megarl.models.architecture import Architecture
from megarl.models.families import list_weights

# A rectangle up to this wide takes all shorter sequences: a call costs more than the padding that it saves.
NARROW = 64
# Wider rectangles take sequences down to this share of their width.
SHARE = 0.75
# In bfloat16 on a CPU the scores are held up to this width: the backward of torch's blocked kernel takes 2
# to 8 times as long there. The choice does not depend on gradients: the same weights give the same log-probs.
DENSE = 256


def build_block_spec(
    arch: Architecture, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, or of its piece `vp_stage` where it holds several."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    specs = [_build_layer_spec(arch, layer) for layer in range(first, first + num_layers)]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def _build_layer_spec(arch: Architecture, layer: int) -> ModuleSpec:
    qk_norm = RMSNorm if arch.qk_norm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    if arch.latent is not None:
        attention = ModuleSpec(
            module=LatentAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=MLASelfAttentionSubmodules(
                linear_q_proj=ColumnParallelLinear,
                linear_q_down_proj=CopiedLinear,
                linear_q_up_proj=ColumnParallelLinear,
                linear_kv_down_proj=CopiedLinear,
                linear_kv_up_proj=ColumnParallelLinear,
                core_attention=PackedAttention,
                linear_proj=RowParallelLinear,
                q_layernorm=RMSNorm,
                kv_layernorm=RMSNorm,
            ),
        )
    if arch.has_experts(layer):
        linears = MLPSubmodules(ColumnParallelLinear, swiglu, OwnedLinear if arch.has_biases else RowParallelLinear)
        experts = ModuleSpec(module=SequentialMLP, submodules=linears)
        shared = ModuleSpec(module=SharedExpertMLP, submodules=linears)
        mlp = ModuleSpec(MoELayer, submodules=MoESubmodules(experts=experts, shared_experts=shared))
    else:
        mlp = ModuleSpec(MLP, submodules=MLPSubmodules(ColumnParallelLinear, swiglu, RowParallelLinear))
    # The names that Transformer Engine's fused layers give in a checkpoint, so that either can load it.
    saved, end = {weight.name: weight.saved for weight in list_weights(arch, layer) if weight.saved}, "weight"
    fused_norms = {own.removesuffix(end): fused.removesuffix(end) for own, fused in saved.items()}
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=fused_norms,
        ),
    )


class _RMSNorm(torch.autograd.Function):
    """Takes a fifth of the time of torch's own rms_norm, which is a chain of operations on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x.float() * scale).mul_(weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad, weight_f = grad.float(), weight.float()
        normed = x.float() * scale
        product = grad * normed
        grad_weight = product.reshape(-1, x.shape[-1]).sum(0)
        # dx = scale * (g w - normed * mean(g w normed))
        mean = torch.matmul(product, weight_f).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = torch.mul(grad, weight_f, out=product).addcmul_(normed, mean, value=-1.0).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight, or 1 + weight, computed in float32 (1910.07467). Works under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps, self.center = eps, float(config.layernorm_zero_centered_gamma)
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 1 - self.center, dtype=config.params_dtype))
        # Each tensor-parallel rank normalizes its part of the sequence: Megatron adds up the weight's gradients.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() + self.center if self.center else self.weight
        normed: Tensor = _RMSNorm.apply(x, weight, self.eps)  # type: ignore[no-untyped-call]
        return normed


class _SwiGLU(torch.autograd.Function):
    """Takes half the time of Megatron's chain of chunk, silu, addition and product, whose gradient is concatenated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        activated = F.silu(gate)
        ctx.save_for_backward(x, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, activated = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, -1)
        torch.mul(grad, activated, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_x


def swiglu(x: Tensor) -> Tensor:
    """[..., 2 f], gates before the rest -> silu(gate) * rest [..., f] (2002.05202)."""
    out: Tensor = _SwiGLU.apply(x)  # type: ignore[no-untyped-call]
    return out


class OwnedLinear(RowParallelLinear):  # type: ignore[misc]
    """Gives a tensor of its own, to which Megatron adds an expert's bias in place."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        out, bias = super().forward(x)
        return out.clone(), bias


class CopiedLinear(torch.nn.Module):
    """x W^T with the same W on every tensor-parallel rank, each of which has its part of the sequence."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **unused: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        # Megatron adds up the weight's gradients, as those of a norm.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


# Megatron asks whether a layer is one of Transformer Engine's, for which it has stand-ins that are no classes, or this.
vars(multi_latent_attention).update(HAVE_TE=False, Linear=CopiedLinear)


class _TokenAngles(torch.nn.Module):
    """The angles of the packed tokens, in place of those of the positions from 0 on that `stock` gives."""

    def __init__(self, stock: torch.nn.Module) -> None:
        super().__init__()
        self.stock, self.get_rotary_seq_len = stock, stock.get_rotary_seq_len
        self.positions: Tensor | None = None

    def forward(self, length: int, packed_seq: bool) -> Any:
        """[S, 1, numbers], and with YaRN its factor"""
        found = self.stock(length, packed_seq=True)
        angles, *factor = found if isinstance(found, tuple) else (found,)
        picked = angles.squeeze(1).index_select(0, self.positions)
        return (picked, *factor) if factor else picked


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Megatron's latent attention, over packed sequences."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        stock: torch.nn.Module = self.rotary_pos_emb
        self.rotary_pos_emb: torch.nn.Module = _TokenAngles(stock)

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Any, position_ids: Any, packed_seq_params: Any, **kwargs: Any
    ) -> Any:
        self.rotary_pos_emb.positions = packed_seq_params.positions
        return super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params, **kwargs
        )


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Core attention of packed sequences with scaled_dot_product_attention; takes a `PackedBatch`'s parameters."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **sizes: int,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout != 0.0:
            raise ValueError(f"the local core attention has no dropout: got attention_dropout={dropout}")
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if has_window else None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query [S, 1, H, D], key [S, 1, K, D] and value [S, 1, K, V], or without the 1 -> [S, 1, H * V]"""
        assert packed_seq_params is not None, "batches are packed"
        q, k, v = (x.view(len(x), *x.shape[-2:]) for x in (query, key, value))
        plan: AttentionPlan = packed_seq_params.attention
        kinds = (self.scale, self.window, getattr(self, "softmax_offset", None))
        if plan.share is None:
            return packed_causal_attention(q, k, v, plan.rectangles, *kinds).unsqueeze(1)
        return context_attention(q, k, v, plan.rectangles, plan.share, *kinds).unsqueeze(1)


@dataclass(frozen=True)
class Rectangle:
    """Consecutive sequences of a packed batch, as rows of equal width."""

    num_rows: int
    width: int
    num_tokens: int
    source: Tensor | None
    """int64 [n * L]: the rectangle's token in each cell (padding cells repeat a row's last); None: no
    padding
    """
    cells: Tensor | None
    """int64 [num_tokens]: the cell of each token; None: no padding"""

    def to(self, device: torch.device) -> "Rectangle":
        tensors = {name: getattr(self, name) for name in ("source", "cells")}
        return replace(self, **{name: x.to(device) for name, x in tensors.items() if x is not None})


def plan_rectangles(lengths: list[int], device: torch.device | None = None) -> tuple[Rectangle, ...]:
    """Cut packed sequences into rectangles. Sequences sorted by length, longest first, give the fewest."""
    rectangles, first = [], 0
    while first < len(lengths):
        width = lengths[first]
        shortest = 0 if width <= NARROW else SHARE * width
        last = first + 1
        while last < len(lengths) and shortest <= lengths[last] <= width:
            last += 1
        rectangles.append(build_rectangle(torch.tensor(lengths[first:last])))
        first = last
    return tuple(rectangle if device is None else rectangle.to(device) for rectangle in rectangles)


def build_rectangle(lengths: Tensor) -> Rectangle:
    """The rectangle of consecutive sequences of these lengths (int64), the first of which is the longest."""
    num_rows, width, num_tokens = len(lengths), int(lengths[0]), int(lengths.sum())
    if num_tokens == num_rows * width:
        return Rectangle(num_rows, width, num_tokens, None, None)
    starts = (lengths.cumsum(0) - lengths)[:, None]
    columns = torch.arange(width)[None, :]
    source = (starts + torch.minimum(columns, lengths[:, None] - 1)).reshape(-1)
    cells = (columns < lengths[:, None]).reshape(-1).nonzero().squeeze(1)
    return Rectangle(num_rows, width, num_tokens, source, cells)


class ToCells(torch.autograd.Function):
    """[tokens, ...] -> [cells, ...]: the token in each cell, and the cell of each token for the way back. The
    gradient of further cells, which repeat tokens as padding, is dropped: nothing real depends on them.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, source: Tensor, cells: Tensor) -> Tensor:
        ctx.cells = cells
        return tokens.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.cells), None, None


class _ToTokens(torch.autograd.Function):
    """[n * L, ...] -> [tokens, ...]"""

    @staticmethod
    def forward(ctx: Any, cells: Tensor, rectangle: Rectangle) -> Tensor:
        ctx.rectangle, ctx.shape = rectangle, cells.shape
        assert rectangle.cells is not None, "a full rectangle has its tokens in order"
        return cells.index_select(0, rectangle.cells)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.shape).index_copy_(0, ctx.rectangle.cells, grad), None


def to_rows(tokens: Tensor, rectangle: Rectangle) -> Tensor:
    """[tokens, H, D] -> [n, H, L, D]"""
    cells = tokens
    if rectangle.source is not None:
        cells = ToCells.apply(tokens, rectangle.source, rectangle.cells)  # type: ignore[no-untyped-call]
    return cells.view(rectangle.num_rows, rectangle.width, *tokens.shape[1:]).transpose(1, 2)


def to_tokens(rows: Tensor, rectangle: Rectangle) -> Tensor:
    """[n, H, L, D] -> [tokens, H * D]"""
    cells = rows.transpose(1, 2).reshape(rectangle.num_rows * rectangle.width, -1)
    if rectangle.cells is None:
        return cells
    tokens: Tensor = _ToTokens.apply(cells, rectangle)  # type: ignore[no-untyped-call]
    return tokens


def _dense_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention that holds the scores: query [n, H, L, D], key and value [n, K, L, D] -> [n, H, L, D]."""
    n, num_heads, width, size = query.shape
    num_groups = key.shape[1]
    # The H / K query heads of a group are rows of one product with its key: nothing is repeated.
    repeats = num_heads // num_groups
    q = query.reshape(n * num_groups, repeats * width, size)
    k = key.reshape(n * num_groups, width, size)
    v = value.reshape(n * num_groups, width, -1)
    mask = torch.full((width, width), float("-inf"), dtype=q.dtype, device=q.device).triu(1).repeat(repeats, 1)
    scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(-1), v).view(n, num_heads, width, -1)


def packed_causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rectangles: tuple[Rectangle, ...],
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """query [S, H, D], key and value [S, K, D] with K dividing H -> [S, H * D]; no token sees another sequence, nor
    other tokens than itself and the window - 1 before it. sinks: [H], as `attend` has them.
    """
    sizes, grouped = [rectangle.num_tokens for rectangle in rectangles], query.shape[1] != key.shape[1]
    holds_scores = query.dtype is torch.bfloat16 and query.device.type == "cpu"
    parts = []
    for rectangle, *packed in zip(rectangles, *(x.split(sizes) for x in (query, key, value)), strict=True):  # type: ignore[no-untyped-call]
        q, k, v = (to_rows(x, rectangle) for x in packed)
        if sinks is not None or (window is not None and rectangle.width > window):
            mask = torch.ones(rectangle.width, rectangle.width, dtype=torch.bool, device=q.device).tril()
            rows = attend(q, k, v, mask, scale, window, sinks)
        elif holds_scores and rectangle.width <= DENSE:
            rows = _dense_attention(q, k, v, scale)
        else:
            rows = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        parts.append(to_tokens(rows, rectangle))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """query [n, H, l, D], key and value [n, K, L, D], mask: bool [..., l, L], keys up to a query's own -> [n, H, l, D].
    sinks: [H], scores of one more key, whose value is 0; None: there is none.
    """
    mask = mask if window is None else narrow(mask, window)
    if sinks is not None:
        shape = (*query.shape[:3], mask.shape[-1])
        scores = query.new_zeros(mask.shape).masked_fill(~mask, float("-inf")).expand(shape)
        mask = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*shape[:3], 1)], -1)
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)


def narrow(mask: Tensor, window: int) -> Tensor:
    """bool [..., L], which keys a query sees, up to its own -> the last `window` of them."""
    return mask & (mask.sum(-1, keepdim=True) - torch.arange(mask.shape[-1], device=mask.device) <= window)


@dataclass(frozen=True)
class AttentionShare:
    """What the attention of one of several context-parallel ranks needs of a micro-batch."""

    order: Tensor
    """int64 [S]: place of each packed token in the gathered [cp * s]"""
    inverse: Tensor
    """int64 [cp * s]: packed token in each place"""
    queries: tuple[Rectangle, ...]
    """This rank's tokens of each rectangle of sequences"""
    masks: tuple[Tensor, ...]
    """bool [n, 1, L / cp, L]: the keys that each of them sees"""
    group: dist.ProcessGroup


@dataclass(frozen=True)
class AttentionPlan:
    """How the packed sequences of a micro-batch are computed."""

    rectangles: tuple[Rectangle, ...]
    """Of all sequences, in their order"""
    share: AttentionShare | None = None
    """None: this rank has all tokens of its sequences"""


def plan_attention(sizes: Tensor, device: torch.device) -> AttentionPlan:
    """sizes: int64, tokens of each packed sequence."""
    return AttentionPlan(plan_rectangles(sizes.tolist(), device))


def share_attention(
    sizes: Tensor,
    device: torch.device,
    positions: Tensor,
    mine: Tensor,
    order: Tensor,
    num_ranks: int,
    group: dist.ProcessGroup,
) -> AttentionPlan:
    """The plan of one rank of a context-parallel group, whose ranks have equal parts of each sequence.

    positions: int64 [S]; mine: bool [S], whether this rank has a token; order: int64 [S], as in `AttentionShare`.
    """
    rectangles = plan_rectangles(sizes.tolist(), device)
    own_positions = positions[mine]
    queries, masks = [], []
    for rectangle, rows in zip(rectangles, sizes.split([each.num_rows for each in rectangles]), strict=True):  # type: ignore[no-untyped-call]
        query = build_rectangle(rows // num_ranks)
        own, own_positions = own_positions[: query.num_tokens], own_positions[query.num_tokens :]
        places = (own if query.source is None else own[query.source]).view(query.num_rows, query.width)
        queries.append(query.to(device))
        masks.append((places[:, None, :, None] >= torch.arange(rectangle.width)).to(device))
    share = AttentionShare(order.to(device), order.argsort().to(device), tuple(queries), tuple(masks), group)
    return AttentionPlan(rectangles, share)


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rectangles: tuple[Rectangle, ...],
    share: AttentionShare,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """query [s, H, D], key and value [s, K, D] of this rank -> [s, H * D]; gradients of keys and values are summed
    over the ranks.
    """
    joined = torch.cat([key, value], -1).contiguous()
    gathered = gather_from_sequence_parallel_region(joined, group=share.group)
    packed: Tensor = ToCells.apply(gathered, share.order, share.inverse)  # type: ignore[no-untyped-call]
    pieces = zip(
        rectangles,
        share.queries,
        share.masks,
        query.split([rectangle.num_tokens for rectangle in share.queries]),  # type: ignore[no-untyped-call]
        packed.split([rectangle.num_tokens for rectangle in rectangles]),  # type: ignore[no-untyped-call]
        strict=True,
    )
    parts = []
    for whole, own, mask, queries, pairs in pieces:
        keys, values = to_rows(pairs, whole).split([key.shape[-1], value.shape[-1]], -1)  # type: ignore[no-untyped-call]
        rows = attend(to_rows(queries, own), keys, values, mask, scale, window, sinks)
        parts.append(to_tokens(rows, own))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
