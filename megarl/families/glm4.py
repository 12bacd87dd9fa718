"""GLM-4-0414: the outputs of attention and MLP are normalized too, positions turn neighbouring numbers of half of each
head, query, key and value projections have a bias, and gate and up projections are one tensor of the checkpoint.
"""

from typing import Any

from megarl.families.architecture import Architecture
from megarl.families.config_json import ConfigJson
from megarl.families.family import Family, with_head_size
from megarl.families.weights import Weight, attention, gated_mlp, norm


def read(config: ConfigJson) -> Architecture:
    return config.read_decoder(
        qkv_bias=config.read_flag("attention_bias", True),
        rotary_share=config.read_rotary_share(0.5),
        output_norms=True,
    )


def list_weights(arch: Architecture, layer: int) -> list[Weight]:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""
    h = arch.hidden_size
    return [
        norm("input_layernorm", "input_layernorm", h, before="self_attention.linear_qkv"),
        *attention(arch),
        norm("self_attention.linear_proj.post_layernorm", "post_self_attn_layernorm", h),
        norm("pre_mlp_layernorm", "post_attention_layernorm", h, before="mlp.linear_fc1"),
        *gated_mlp("mlp", "mlp", h, arch.ffn_size, fused=True),
        norm("mlp.linear_fc2.post_layernorm", "post_mlp_layernorm", h),
    ]


def megatron_fields(_: Architecture) -> dict[str, Any]:
    return {"rotary_interleaved": True}


FAMILY = Family(
    "glm4",
    hf_class="Glm4",
    sglang_module="glm4",
    read=read,
    list_weights=list_weights,
    megatron_fields=megatron_fields,
    random_fields=with_head_size,
)
