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
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megarl.mcore.model.layers import PackedAttention, RMSNorm
from megarl.mcore.model.router import ExpertLayer, Router
from megarl.mcore.role_fields import has_transformer_engine


def uses_transformer_engine() -> bool:
    return torch.cuda.is_available() and has_transformer_engine()


def build_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, or of its piece `vp_stage` where it holds several."""
    if uses_transformer_engine():
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        if config.num_moe_experts is not None:
            for layer in block.layer_specs:
                layer.module = ExpertLayer
                layer.submodules.mlp.submodules.router = Router
        return block
    layer = _build_local_layer_spec(config)
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)


def _build_local_layer_spec(config: TransformerConfig) -> ModuleSpec:
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
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
    dense = config.num_moe_experts is None
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    experts = MoESubmodules(experts=ModuleSpec(module=SequentialMLP, submodules=linears), router=Router)
    # The names that Transformer Engine's fused layers give in a checkpoint, so that either can load it. It fuses
    # no norm with experts.
    fused_norms = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if dense:
        fused_norms["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return ModuleSpec(
        module=TransformerLayer if dense else ExpertLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(module=MLP, submodules=linears)
            if dense
            else ModuleSpec(module=MoELayer, submodules=experts),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=fused_norms,
        ),
    )
