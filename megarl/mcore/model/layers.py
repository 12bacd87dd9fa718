"""The local layers: RMSNorm, SwiGLU, core attention over packed sequences, and the critic's value head.

Shapes: S packed tokens, H heads, D size of a head, h hidden size.
"""

import functools
import math
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from megarl.mcore.cpu.segments import packed_causal_attention
from megarl.mcore.model.context_parallel import context_attention


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
    """x / rms(x) * weight, computed in float32 (1910.07467). Works under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each tensor-parallel rank normalizes its part of the sequence: Megatron adds up the weight's gradients.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normed


@functools.cache
def add_output_norm(linear: type[torch.nn.Module], norm: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The linear layer class with a norm of its output, its parameter post_layernorm.weight."""

    class NormalizedLinear(linear):  # type: ignore[valid-type,misc]
        def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.post_layernorm = norm(config=config, hidden_size=output_size, eps=config.layernorm_epsilon)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            out, bias = super().forward(x)
            return self.post_layernorm(out), bias

    return NormalizedLinear


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
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout != 0.0 or config.window_size is not None:
            raise ValueError(
                "the local core attention has neither dropout nor a sliding window: got "
                f"attention_dropout={dropout}, window_size={config.window_size}"
            )
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
        """query [S, 1, H, D], key and value [S, 1, K, D] -> [S, 1, H * D]"""
        assert packed_seq_params is not None, "batches are packed"
        q, k, v = (x.squeeze(1) for x in (query, key, value))
        rectangles, share = packed_seq_params.rectangles, packed_seq_params.attention_share
        if share is None:
            return packed_causal_attention(q, k, v, rectangles, self.scale).unsqueeze(1)
        return context_attention(q, k, v, rectangles, share, self.scale).unsqueeze(1)


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


def squash(z: Tensor, low: float, high: float) -> Tensor:
    """low + (high - low) * (1/2 + atan(z)/pi), between low and high (BPCO 2608.23566, equation 9); of any shape."""
    return low + (high - low) * (0.5 + torch.atan(z) / math.pi)


class ValueHead(MegatronModule):  # type: ignore[misc]
    """Linear(h, 1) in float32, the same on every tensor-parallel rank, in place of the output layer."""

    value_range: tuple[float, float] | None = None
    """The bounds of `squash`, which the values then go through"""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        # Zero: the first values are exactly 0 (with a range its middle), and the first gradient goes into the head
        # alone.
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """[R, 1, h] -> float32 [R, 1, 1]"""
        values = F.linear(hidden.float(), self.weight.float())
        return values if self.value_range is None else squash(values, *self.value_range), None
