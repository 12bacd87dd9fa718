"""The transformer's layers: Transformer Engine's where it can run, the local ones elsewhere."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.mcore.model.router import ExpertLayer, Router
from megarl.mcore.role_fields import has_transformer_engine
from megarl.models.architecture import Architecture

LinearAndNorm = tuple[Any, Any]


@dataclass(frozen=True)
class Layers:
    """Who computes a model's layers, and what that asks of the model and of a micro-batch."""

    name: str
    build: Callable[[Architecture, TransformerConfig, int | None], TransformerBlockSubmodules]
    find_output: Callable[[], LinearAndNorm]
    """The linear layer at the end of attention and MLP, and the norm"""
    qkv_format: str
    """Of Megatron's packing parameters. Under "sbhd" Megatron keeps tensors as [S, 1, H, D] and takes rotary angles as
    they are."""
    plan_attention: Callable[..., Any] = lambda *args: None
    """(sizes, device) -> what its attention needs of a micro-batch beside Megatron's parameters"""
    share_attention: Callable[..., Any] = lambda *args: None
    """The same under context parallelism, further (positions, mine, order, num_ranks, group) as in cpu/layers.py"""
    groups_experts: bool = False
    """One module has all experts of a rank"""
    picks_angles: bool = False
    """It takes the rotary angles of the packed tokens; else those of positions from 0 on"""
    has_activation: bool = False
    """The activation of its MLPs is in the layer's specification"""


@functools.cache
def find_layers() -> Layers:
    """Transformer Engine's where it can run, the local ones elsewhere."""
    if torch.cuda.is_available() and has_transformer_engine():
        return Layers(
            "Transformer Engine's layers", _build_transformer_engine, _find_engine_output, "thd", groups_experts=True
        )
    return build_local_layers()


def build_local_layers() -> Layers:
    from megarl.cpu import layers

    return Layers(
        "local layers",
        layers.build_block_spec,
        lambda: (RowParallelLinear, layers.RMSNorm),
        "sbhd",
        layers.plan_attention,
        layers.share_attention,
        picks_angles=True,
        has_activation=True,
    )


def build_block_spec(
    arch: Architecture, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, or of its piece `vp_stage` where it holds several, with what megarl has of its
    own in them.
    """
    layers = find_layers()
    block = layers.build(arch, config, vp_stage)
    for layer in block.layer_specs:
        parts = layer.submodules
        if parts.mlp.module is MoELayer:
            layer.module = ExpertLayer
            parts.mlp.submodules.router = Router
        if arch.output_norms:
            linear, norm = layers.find_output()
            normalized = add_output_norm(linear, norm)
            parts.self_attention.submodules.linear_proj = normalized
            parts.mlp.submodules.linear_fc2 = normalized
    return block


def _build_transformer_engine(
    arch: Architecture, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)


def _find_engine_output() -> LinearAndNorm:
    from megatron.core.extensions.transformer_engine import TENorm, TERowParallelLinear

    return TERowParallelLinear, TENorm


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
