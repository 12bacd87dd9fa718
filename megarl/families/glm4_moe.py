"""GLM-4.5 to 4.7 (2508.06471): the first layers are dense, the others have routed and shared experts.

The router weighs experts by their sigmoids and chooses them by these plus a correction bias, as DeepSeek-V3 does
(2412.19437, section 2.1.2). The bias is a float32 constant of the checkpoint: it goes to the servers and into every
export, and no update changes it.
"""

from typing import Any

from megarl.config.schema.model import RandomModelConfig
from megarl.families.architecture import Architecture, Experts
from megarl.families.config_json import ConfigJson
from megarl.families.family import Family, with_head_size


def read(config: ConfigJson) -> Architecture:
    # Megatron takes other numbers of experts of each group than transformers and SGLang do.
    config.require("n_group", 1)
    config.require("topk_group", 1)
    # Megatron normalizes the weights of a sigmoid router always.
    config.require("norm_topk_prob", True)
    # Layers that predict further tokens are not trained: exported with the others they would no longer fit them.
    config.require("num_nextn_predict_layers", 0)
    num_dense, num_layers = config.read_size("first_k_dense_replace", 1, 0), config.read_size("num_hidden_layers")
    if not 0 <= num_dense < num_layers:
        raise ValueError(
            f"{config.path}: first_k_dense_replace is {num_dense}; it must be below num_hidden_layers, {num_layers}, so"
            " that a layer has experts"
        )
    expert_size = config.read_size("moe_intermediate_size")
    experts = Experts(
        num_experts=config.read_size_of("n_routed_experts", "num_local_experts"),
        top_k=config.read_size("num_experts_per_tok"),
        ffn_size=expert_size,
        normalized=True,
        num_dense_layers=num_dense,
        shared_ffn_size=expert_size * config.read_size("n_shared_experts", 1, 0),
        score_function="sigmoid",
        scaling_factor=config.read_number("routed_scaling_factor", 1.0),
        has_correction_bias=True,
    )
    return config.read_decoder(
        qkv_bias=config.read_flag("attention_bias", False),
        qk_norm=config.read_flag("use_qk_norm", False),
        rotary_share=config.read_rotary_share(0.5),
        experts=config.check_experts(experts),
    )


def random_fields(random: RandomModelConfig) -> dict[str, Any]:
    """One dense layer, then experts and a shared one as wide as they are."""
    return {
        **with_head_size(random),
        "n_routed_experts": random.num_experts,
        "num_experts_per_tok": random.experts_per_token,
        "moe_intermediate_size": random.ffn_size,
        "n_shared_experts": 1,
        "first_k_dense_replace": min(1, random.num_layers - 1),
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
    }


FAMILY = Family(
    "glm4_moe",
    hf_class="Glm4Moe",
    sglang_module="glm4_moe",
    read=read,
    random_fields=random_fields,
    has_experts=True,
    # Fused they would be one more routed expert.
    server_options={"disable_shared_experts_fusion": True},
)
