"""The transformer's layers: Transformer Engine's where it can run, the local ones elsewhere."""

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from megarl.mcore.model.layers import PackedAttention, RMSNorm, add_output_norm, swiglu
from megarl.mcore.model.router import ExpertLayer, Router
from megarl.mcore.role_fields import has_transformer_engine
from megarl.models.architecture import Architecture
from megarl.models.families import list_weights


def uses_transformer_engine() -> bool:
    return torch.cuda.is_available() and has_transformer_engine()


def build_block_spec(
    arch: Architecture, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, or of its piece `vp_stage` where it holds several."""
    if uses_transformer_engine():
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        for layer in block.layer_specs:
            _adapt_transformer_engine(arch, layer)
        return block
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    specs = [_build_local_layer_spec(arch, layer) for layer in range(first, first + num_layers)]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def _adapt_transformer_engine(arch: Architecture, layer: ModuleSpec) -> None:
    """Put what megarl has of its own into a layer of Transformer Engine's."""
    parts = layer.submodules
    if parts.mlp.module is MoELayer:
        layer.module = ExpertLayer
        parts.mlp.submodules.router = Router
    if arch.output_norms:
        from megatron.core.extensions.transformer_engine import TENorm, TERowParallelLinear

        normalized = add_output_norm(TERowParallelLinear, TENorm)
        parts.self_attention.submodules.linear_proj = normalized
        parts.mlp.submodules.linear_fc2 = normalized


def _build_local_layer_spec(arch: Architecture, layer: int) -> ModuleSpec:
    qk_norm = RMSNorm if arch.qk_norm else IdentityOp
    out = add_output_norm(RowParallelLinear, RMSNorm) if arch.output_norms else RowParallelLinear
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=out,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    if arch.has_experts(layer):
        linears = MLPSubmodules(ColumnParallelLinear, swiglu, RowParallelLinear)
        experts = ModuleSpec(module=SequentialMLP, submodules=linears)
        shared = ModuleSpec(module=SharedExpertMLP, submodules=linears)
        mlp = ModuleSpec(MoELayer, submodules=MoESubmodules(experts=experts, shared_experts=shared, router=Router))
    else:
        mlp = ModuleSpec(MLP, submodules=MLPSubmodules(ColumnParallelLinear, swiglu, out))
    return ModuleSpec(
        module=ExpertLayer if arch.has_experts(layer) else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=_list_fused_norms(arch, layer),
        ),
    )


def _list_fused_norms(arch: Architecture, layer: int) -> dict[str, str]:
    """The names that Transformer Engine's fused layers give in a checkpoint, so that either can load it."""
    end = "weight"
    return {
        weight.name.removesuffix(end): weight.saved.removesuffix(end)
        for weight in list_weights(arch, layer)
        if weight.saved
    }
