"""Qwen3-MoE (2505.09388): Qwen3 with a mixture of experts in every layer."""

from typing import Any

from megarl.config.schema.model import RandomModelConfig
from megarl.families.architecture import Architecture, Experts
from megarl.families.config_json import ConfigJson
from megarl.families.family import Family, with_head_size


def read(config: ConfigJson) -> Architecture:
    config.require("attention_bias", False)
    config.ignore("sliding_window")
    experts = Experts(
        # transformers 5 writes num_local_experts, earlier ones num_experts.
        num_experts=config.read_size_of("num_experts", "num_local_experts"),
        top_k=config.read_size("num_experts_per_tok"),
        ffn_size=config.read_size("moe_intermediate_size"),
        normalized=config.read_flag("norm_topk_prob", False),
    )
    for key, value in {"decoder_sparse_step": 1, "mlp_only_layers": []}.items():
        config.require(key, value, ", experts in every layer,")
    return config.read_decoder(qk_norm=True, experts=config.check_experts(experts))


def random_fields(random: RandomModelConfig) -> dict[str, Any]:
    return {
        **with_head_size(random),
        "num_experts": random.num_experts,
        "num_experts_per_tok": random.experts_per_token,
        "moe_intermediate_size": random.ffn_size,
        "norm_topk_prob": True,
    }


FAMILY = Family(
    "qwen3_moe",
    hf_class="Qwen3Moe",
    sglang_module="qwen3_moe",
    read=read,
    random_fields=random_fields,
    has_experts=True,
    only_values={"use_qk_norm": True},
)
