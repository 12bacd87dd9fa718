"""Who computes a model's layers, and which of Megatron-Core's (0.16.1) faster ways this process takes. None changes a
result but by rounding, and a key of model.megatron or of the optimizer decides instead where it is given.
"""

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.config.schema.roles import OptimizerConfig, ParallelConfig
from megarl.mcore.device import find_processor
from megarl.mcore.router import ExpertLayer, Router
from megarl.mcore.spec import WorkerSpec, has_transformer_engine
from megarl.models.architecture import Architecture
from megarl.models.families import FAMILIES


@dataclass(frozen=True)
class Layers:
    """Who computes a model's layers, and what that asks of the model and of a micro-batch."""

    name: str
    build: Callable[[Architecture, TransformerConfig, int | None], TransformerBlockSubmodules]
    output: tuple[Any, Any]
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
    if find_kernels().te:
        from megatron.core.extensions.transformer_engine import TENorm, TERowParallelLinear

        def build(arch: Architecture, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
            return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)

        return Layers("Transformer Engine's layers", build, (TERowParallelLinear, TENorm), "thd", groups_experts=True)
    from megarl.cpu import layers

    return Layers(
        "local layers",
        layers.build_block_spec,
        (RowParallelLinear, layers.RMSNorm),
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
            normalized = add_output_norm(*layers.output)
            parts.self_attention.submodules.linear_proj = normalized
            parts.mlp.submodules.linear_fc2 = normalized
    return block


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


_PERMUTE = ("permute", "permute_with_probs", "sort_chunks_by_index", "sort_chunks_by_index_with_probs", "unpermute")


@dataclass(frozen=True)
class Kernels:
    """What this process can run."""

    gpu: bool = False
    te: bool = False
    """Transformer Engine's layers are the model's"""
    rope: bool = False
    """Transformer Engine's rotary kernel for packed sequences"""
    permute: bool = False
    """Transformer Engine's kernels that sort tokens by expert"""
    apex: bool = False
    """Apex' fused_weight_gradient_mlp_cuda, which the layers of Megatron itself add weight gradients with"""
    compiler: bool = False
    """What torch.compile needs on a GPU: Triton, and a C compiler for its launchers"""


@functools.cache
def find_kernels() -> Kernels:
    if find_processor().capability is None:
        return Kernels()
    return Kernels(
        gpu=True,
        te=has_transformer_engine(),
        rope=rope_utils.fused_apply_rotary_pos_emb_thd is not None,
        permute=all(getattr(moe_utils, f"fused_{name}", None) is not None for name in _PERMUTE),
        apex=layers._grad_accum_fusion_available,
        compiler=importlib.util.find_spec("triton") is not None
        and any(map(shutil.which, (os.environ.get("CC", "gcc"), "gcc", "clang"))),
    )


def build_fast_fields(arch: Architecture, megatron: Mapping[str, Any], kernels: Kernels) -> dict[str, bool]:
    """The fields of TransformerConfig that are on where they can be.

    megatron: model.megatron, of which other fields may exclude one of these.
    """
    fields = {
        "apply_rope_fusion": kernels.te and kernels.rope and not _turns_neighbours(arch),
        "bias_activation_fusion": kernels.compiler and not megatron.get("use_te_activation_func"),
        "gradient_accumulation_fusion": kernels.te or kernels.apex,
    }
    if arch.experts is not None:
        fields["moe_permute_fusion"] = kernels.te and kernels.permute
    return {field: is_on and kernels.gpu for field, is_on in fields.items()}


def check_fast_fields(arch: Architecture, megatron: Mapping[str, Any]) -> Iterator[str]:
    """What Megatron itself does not refuse, and computes wrong numbers with."""
    if megatron.get("apply_rope_fusion") and _turns_neighbours(arch):
        yield (
            "model.megatron.apply_rope_fusion: found true, but the model turns neighbouring numbers, of which Megatron"
            " does not tell Transformer Engine's packed kernel; leave it out"
        )


def resolve_overlap(optimizer: OptimizerConfig, parallel: ParallelConfig, gpu: bool) -> OptimizerConfig:
    """The optimizer with true or false for each null of its overlap keys, of which gathering needs reducing."""
    automatic = gpu and parallel.dp * parallel.cp > 1
    reduce, gather = optimizer.overlap_grad_reduce, optimizer.overlap_param_gather
    reduce = reduce if reduce is not None else automatic or bool(gather)
    gather = gather if gather is not None else automatic and reduce
    return replace(optimizer, overlap_grad_reduce=reduce, overlap_param_gather=gather)


def choose_overlap(spec: WorkerSpec) -> WorkerSpec:
    """The spec with the overlap keys of its optimizer decided for this process."""
    if spec.optimizer is None:
        return spec
    return replace(spec, optimizer=resolve_overlap(spec.optimizer, spec.parallel, find_kernels().gpu))


def fuse_weight_gradients(model: torch.nn.Module) -> int:
    """Have Transformer Engine's layers, whose number is returned, add their weight gradients to the float32 ones in the
    product itself. By Megatron's own field for it its output layer would refuse to be built without Apex.
    """
    fused = [module for module in model.modules() if hasattr(module, "fuse_wgrad_accumulation")]
    for module in fused:
        module.fuse_wgrad_accumulation = True  # type: ignore[assignment]
    return len(fused)


def describe_fast_ways(arch: Architecture, spec: WorkerSpec, fields: Mapping[str, Any]) -> Iterator[str]:
    """The ways that are on and, on a GPU, those that are off, a line each.

    spec: after `choose_overlap`. fields: of the TransformerConfig.
    """
    kernels = find_kernels()
    ways = {field: bool(fields[field]) for field in build_fast_fields(arch, spec.megatron, kernels)}
    if spec.optimizer is not None:
        ways |= {name: bool(getattr(spec.optimizer, name)) for name in ("overlap_grad_reduce", "overlap_param_gather")}
    for is_on, what in ((True, "on"), (False, "off")):
        names = [name for name, found in ways.items() if found is is_on]
        if names and (is_on or kernels.gpu):
            yield f"{what}: {', '.join(names)}"


def _turns_neighbours(arch: Architecture) -> bool:
    return bool(FAMILIES[arch.family].megatron_fields(arch).get("rotary_interleaved"))
