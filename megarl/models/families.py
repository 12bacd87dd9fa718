"""All families of models, by the model_type of config.json: how each is read, and what its tensors are.

The mapping of Hugging Face checkpoints, the plan of the weight sync, the planner, the random models and the export read
these tables and name no family themselves. docs/extending.md says how to add one.

Megatron keeps query, key and value of a key-value head together (linear_qkv: for each group its query heads, its key
head, its value head) and the gate and up projections stacked (linear_fc1). SGLang stacks the query, key and value heads
of a rank (qkv_proj), its gate and up rows (gate_up_proj), and the experts of a layer (w13_weight and w2_weight). Names
are those within a layer: `self_attn.q_proj.weight` stands for `model.layers.3.self_attn.q_proj.weight`, and `{}` for
the number of an expert.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

from megarl.config.schema.roles import RandomModelConfig
from megarl.models.architecture import Architecture, ConfigJson, Experts, Latent
from megarl.models.rope import Rope

Shape = tuple[int, ...]


class Split(Enum):
    """What each rank holds of a parameter under tensor parallelism, in training and in serving alike."""

    none = "none"
    """All of it"""
    columns = "columns"
    rows = "rows"
    vocab = "vocab"
    """Its share of the rows, which are padded"""
    qkv = "qkv"
    """The query heads of its groups, and their key and value heads"""
    gate_up = "gate_up"
    """Its share of the gate rows and of the up rows"""


@dataclass(frozen=True)
class Weight:
    """One parameter of a layer: a row of the table."""

    name: str
    """Megatron's, as its local layers have it"""
    hf_names: tuple[str, ...]
    """The Hugging Face tensors that it is made of: those of its parts, or one that holds them all"""
    shapes: tuple[Shape, ...]
    """Shapes of the Hugging Face tensors"""
    split: Split = Split.none
    served: str = ""
    """SGLang's tensor; empty: named as the Hugging Face one"""
    served_row: int = 0
    """Its first row in SGLang's tensor, which holds others too"""
    saved: str = ""
    """The name in Megatron's checkpoints, and that of Transformer Engine's layers; empty: as `name`"""
    per_expert: bool = False
    """There is one for each expert."""
    interleaved: bool = False
    """SGLang's tensor has rows of its two parts by turns, so that each pair is taken as one row here"""
    is_constant: bool = False
    """A buffer in float32, whatever the dtype of the model, that training leaves as it is"""
    rows: tuple[int, ...] = ()
    """Rows of each part, where one Hugging Face tensor holds them all"""


def norm(name: str, hf_name: str, size: int, *, before: str | None = None) -> Weight:
    """before: the linear layer with which Transformer Engine fuses the norm."""
    saved = f"{before}.layer_norm_weight" if before else ""
    return Weight(f"{name}.weight", (f"{hf_name}.weight",), ((size,),), saved=saved)


def attention(arch: Architecture, *, fused: bool = False) -> list[Weight]:
    """Grouped-query attention; with a bias, and with norms of the heads, where the architecture has them. fused: the
    Hugging Face checkpoint holds query, key and value as one tensor.
    """
    h, heads, kv_heads = arch.hidden_size, arch.num_heads * arch.head_size, arch.num_kv_heads * arch.head_size
    rows = (heads, kv_heads, kv_heads)
    weights = []
    for kind in ("weight", "bias") if arch.qkv_bias else ("weight",):
        names = tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv")
        shapes: tuple[Shape, ...] = tuple((size, h) if kind == "weight" else (size,) for size in rows)
        name, served = f"self_attention.linear_qkv.{kind}", f"self_attn.qkv_proj.{kind}"
        if fused:
            names, shapes = (served,), ((sum(rows), *shapes[0][1:]),)
        weights.append(Weight(name, names, shapes, Split.qkv, served=served, rows=rows if fused else ()))
    columns = ("self_attn.o_proj.weight",)
    weights.append(Weight("self_attention.linear_proj.weight", columns, ((h, heads),), Split.columns))
    if arch.has_biases:
        sinks = ("self_attn.sinks",), ((arch.num_heads,),)
        weights.append(Weight("self_attention.linear_proj.bias", ("self_attn.o_proj.bias",), ((h,),)))
        weights.append(Weight("self_attention.core_attention.softmax_offset", *sinks, Split.rows))
    if arch.qk_norm:
        sizes = zip("qk", rows if arch.joins_heads else (arch.head_size, arch.head_size), strict=False)
        weights += [norm(f"self_attention.{x}_layernorm", f"self_attn.{x}_norm", size) for x, size in sizes]
    return weights


def gated_mlp(name: str, hf_name: str, hidden_size: int, ffn_size: int, *, fused: bool = False) -> list[Weight]:
    """down(silu(gate(x)) * up(x)). fused: the Hugging Face checkpoint holds gate and up as one tensor."""
    served = f"{hf_name}.gate_up_proj.weight"
    names: tuple[str, ...] = (f"{hf_name}.gate_proj.weight", f"{hf_name}.up_proj.weight")
    shapes: tuple[Shape, ...] = ((ffn_size, hidden_size), (ffn_size, hidden_size))
    if fused:
        names, shapes = (served,), ((2 * ffn_size, hidden_size),)
    return [
        Weight(
            *(f"{name}.linear_fc1.weight", names, shapes, Split.gate_up),
            served=served,
            rows=(ffn_size, ffn_size) if fused else (),
        ),
        Weight(
            f"{name}.linear_fc2.weight", (f"{hf_name}.down_proj.weight",), ((hidden_size, ffn_size),), Split.columns
        ),
    ]


def mixture(hidden_size: int, experts: Experts) -> list[Weight]:
    """Router and experts; where there are any, the bias by which experts are chosen and the shared experts."""
    weights = [Weight("mlp.router.weight", ("mlp.gate.weight",), ((experts.num_experts, hidden_size),))]
    if experts.has_correction_bias:
        name, shape = "mlp.gate.e_score_correction_bias", (experts.num_experts,)
        weights.append(Weight("mlp.router.expert_bias", (name,), (shape,), is_constant=True))
    gate_up, down = gated_mlp("mlp.experts.{}", "mlp.experts.{}", hidden_size, experts.ffn_size)
    weights += [
        Weight(gate_up.name, gate_up.hf_names, gate_up.shapes, gate_up.split, "mlp.experts.w13_weight", 0, "", True),
        Weight(down.name, down.hf_names, down.shapes, down.split, "mlp.experts.w2_weight", 0, "", True),
    ]
    if experts.shared_ffn_size:
        weights += gated_mlp("mlp.shared_experts", "mlp.shared_experts", hidden_size, experts.shared_ffn_size)
    return weights


def pre_norm_layer(arch: Architecture, layer: int) -> list[Weight]:
    """x + attention(norm(x)), then x + mlp(norm(x)), with a mixture of experts where the layer has one."""
    h = arch.hidden_size
    weights = [norm("input_layernorm", "input_layernorm", h, before="self_attention.linear_qkv"), *attention(arch)]
    if arch.experts is not None and arch.has_experts(layer):
        # Transformer Engine fuses no norm with experts.
        norms = [norm("pre_mlp_layernorm", "post_attention_layernorm", h)]
        return [*weights, *norms, *mixture(h, arch.experts)]
    return dense_layer(arch)


AROUND = ("post_attention_layernorm", "post_feedforward_layernorm")
"""Where Gemma 3 and OLMo 2 normalize outputs"""


def dense_layer(
    arch: Architecture,
    before_mlp: str = "post_attention_layernorm",
    outputs: tuple[str, ...] = (),
    *,
    fused_qkv: bool = False,
    fused_mlp: bool = False,
) -> list[Weight]:
    """before_mlp, outputs: the Hugging Face names of the norms of what goes into the MLP, and of what comes out of
    attention and MLP, where the architecture has them.
    """
    h, weights, mlp = (
        arch.hidden_size,
        attention(arch, fused=fused_qkv),
        ("mlp", "mlp", arch.hidden_size, arch.ffn_size),
    )
    if arch.input_norms:
        weights.insert(0, norm("input_layernorm", "input_layernorm", h, before="self_attention.linear_qkv"))
        weights.append(norm("pre_mlp_layernorm", before_mlp, h, before="mlp.linear_fc1"))
    places = ("self_attention.linear_proj", "mlp.linear_fc2")
    around = [norm(f"{place}.post_layernorm", name, h) for place, name in zip(places, outputs, strict=False)]
    return [*weights, *gated_mlp(*mlp, fused=fused_mlp), *around]


def with_head_size(random: RandomModelConfig) -> dict[str, Any]:
    """The key of families whose heads need not be hidden_size / num_heads wide."""
    return {"head_dim": random.hidden_size // random.num_heads}


@dataclass(frozen=True)
class Family:
    """One of `FAMILIES`."""

    name: str
    """model_type of config.json"""
    hf_class: str
    """What the names of its classes in transformers begin with: Qwen3 of Qwen3ForCausalLM"""
    sglang_module: str
    """The module of sglang.srt.models that serves it"""
    read: Callable[[ConfigJson], Architecture]
    """Raises ValueError, naming the key, for what is not built here"""
    list_weights: Callable[[Architecture, int], list[Weight]] = pre_norm_layer
    """The tensors of a layer, by its number from 0"""
    megatron_fields: Callable[[Architecture], dict[str, Any]] = lambda _: {}
    """Fields of Megatron's TransformerConfig besides those that follow from the architecture"""
    random_fields: Callable[[RandomModelConfig], dict[str, Any]] = lambda _: {}
    """Keys of the config.json of a random model besides those that all families have"""
    has_experts: bool = False
    only_values: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that `read` does not read, each with the value, or a tuple of those, that it must have where
    it is there; beside `architecture.ONLY_VALUES`"""
    server_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the SGLang server without which it would hold other tensors than the table says"""
    cpu_options: Mapping[str, Any] = field(default_factory=dict)
    """The same of a server on a CPU alone"""
    hf_classifier: str = ""
    """The class of its critics in transformers; empty: `hf_class` and ForSequenceClassification"""


LLAMA = Family(
    "llama", hf_class="Llama", sglang_module="llama", read=ConfigJson.read_decoder, random_fields=with_head_size
)


# Granite 3 (2408.13359): Llama with factors of embeddings, scores, residuals and logits.


def read_granite(config: ConfigJson) -> Architecture:
    # x + m f(norm(x)) is m (y + f(norm(y))) with y = x / m, where the norm of y has eps / m^2.
    residual = config.read_number("residual_multiplier", 1.0)
    return config.read_decoder(
        norm_eps=config.read_number("rms_norm_eps", 1e-6) / residual**2,
        embedding_scale=config.read_number("embedding_multiplier", 1.0) / residual,
        query_size=config.read_number("attention_multiplier", 1.0) ** -2,
        logits_scale=1 / config.read_number("logits_scaling", 1.0),
    )


GRANITE = Family(
    "granite",
    hf_class="Granite",
    sglang_module="granite",
    read=read_granite,
    random_fields=lambda random: {
        **with_head_size(random),
        **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2},
        **{"residual_multiplier": 0.4, "logits_scaling": 2.0, "rms_norm_eps": 1e-3},
    },
)


# Qwen2 and Qwen2.5 (2407.10671): query, key and value projections have a bias.


def read_qwen2(config: ConfigJson) -> Architecture:
    config.require("attention_bias", False)
    config.ignore("sliding_window")
    return config.read_decoder(qkv_bias=True)


QWEN2 = Family(
    "qwen2",
    hf_class="Qwen2",
    sglang_module="qwen2",
    read=read_qwen2,
    only_values={"qkv_bias": True, "is_qwen2_config": True},
)


# Qwen3 (2505.09388): query and key heads are normalized.


def read_qwen3(config: ConfigJson) -> Architecture:
    config.ignore("sliding_window")
    return config.read_decoder(qk_norm=True, head_size=config.read_size("head_dim", 128))


QWEN3 = Family(
    "qwen3",
    hf_class="Qwen3",
    sglang_module="qwen3",
    read=read_qwen3,
    random_fields=with_head_size,
    only_values={"use_qk_norm": True},
)


# Qwen3-MoE (2505.09388): Qwen3 with a mixture of experts in every layer.


def read_qwen3_moe(config: ConfigJson) -> Architecture:
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


def qwen3_moe_random_fields(random: RandomModelConfig) -> dict[str, Any]:
    return {
        **with_head_size(random),
        "num_experts": random.num_experts,
        "num_experts_per_tok": random.experts_per_token,
        "moe_intermediate_size": random.ffn_size,
        "norm_topk_prob": True,
    }


QWEN3_MOE = Family(
    "qwen3_moe",
    hf_class="Qwen3Moe",
    sglang_module="qwen3_moe",
    read=read_qwen3_moe,
    random_fields=qwen3_moe_random_fields,
    has_experts=True,
    only_values={"use_qk_norm": True},
)


# GLM-4-0414: the outputs of attention and MLP are normalized too, positions turn neighbouring numbers of half of each
# head, query, key and value projections have a bias, and gate and up projections are one tensor of the checkpoint.


def read_glm4(config: ConfigJson) -> Architecture:
    return config.read_decoder(
        qkv_bias=config.read_flag("attention_bias", True), rotary_share=config.read_rotary_share(0.5), output_norms=True
    )


GLM4 = Family(
    "glm4",
    hf_class="Glm4",
    sglang_module="glm4",
    read=read_glm4,
    list_weights=lambda arch, _: dense_layer(
        arch, outputs=("post_self_attn_layernorm", "post_mlp_layernorm"), fused_mlp=True
    ),
    megatron_fields=lambda _: {"rotary_interleaved": True},
    random_fields=with_head_size,
)


# GLM-4.5 to 4.7 (2508.06471): the first layers are dense, the others have routed and shared experts.
#
# The router weighs experts by their sigmoids and chooses them by these plus a correction bias, as DeepSeek-V3 does
# (2412.19437, section 2.1.2). The bias is a float32 constant of the checkpoint: it goes to the servers and into every
# export, and no update changes it.


def read_sigmoid_experts(config: ConfigJson) -> Experts:
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
    expert_size, top_k = config.read_size("moe_intermediate_size"), config.read_size("num_experts_per_tok")
    num_experts = config.read_size_of("n_routed_experts", "num_local_experts")
    groups, chosen = config.read_size("n_group", 1), config.read_size("topk_group", 1)
    experts = Experts(
        num_experts=num_experts,
        top_k=top_k,
        ffn_size=expert_size,
        normalized=True,
        num_dense_layers=num_dense,
        shared_ffn_size=expert_size * config.read_size("n_shared_experts", 1, 0),
        score_function="sigmoid",
        scaling_factor=config.read_number("routed_scaling_factor", 1.0),
        has_correction_bias=True,
        num_groups=groups,
        top_groups=chosen,
    )
    config.check_experts(experts)
    if (groups, chosen) != (1, 1) and (num_experts % groups or chosen > groups or top_k != 2 * chosen):
        # Megatron rates a group by as many scores, transformers and SGLang by two.
        raise ValueError(
            f"{config.path}: n_group is {groups}, topk_group {chosen} and num_experts_per_tok {top_k}; n_group must"
            f" divide {num_experts} experts and be topk_group or more, num_experts_per_tok must be 2 * topk_group"
        )
    return experts


def read_glm4_moe(config: ConfigJson) -> Architecture:
    return config.read_decoder(
        qkv_bias=config.read_flag("attention_bias", False),
        qk_norm=config.read_flag("use_qk_norm", False),
        rotary_share=config.read_rotary_share(0.5),
        experts=read_sigmoid_experts(config),
    )


def sigmoid_experts_random_fields(random: RandomModelConfig) -> dict[str, Any]:
    """One dense layer, then experts and a shared one as wide as they are, in two groups where that goes."""
    has_groups = random.experts_per_token == 2 and random.num_experts % 4 == 0
    return {
        "n_routed_experts": random.num_experts,
        "num_experts_per_tok": random.experts_per_token,
        "moe_intermediate_size": random.ffn_size,
        "n_shared_experts": 1,
        "first_k_dense_replace": min(1, random.num_layers - 1),
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
        "n_group": 2 if has_groups else 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
    }


def glm4_moe_random_fields(random: RandomModelConfig) -> dict[str, Any]:
    kinds = {"attention_bias": True, "use_qk_norm": True}
    return {**with_head_size(random), **sigmoid_experts_random_fields(random), **kinds}


GLM4_MOE = Family(
    "glm4_moe",
    hf_class="Glm4Moe",
    sglang_module="glm4_moe",
    read=read_glm4_moe,
    random_fields=glm4_moe_random_fields,
    has_experts=True,
    # Fused they would be one more routed expert.
    server_options={"disable_shared_experts_fusion": True},
)


# Mistral, Mistral-Nemo and Ministral-8B, whose window is its longest sequence.

MISTRAL = Family(
    "mistral",
    hf_class="Mistral",
    sglang_module="mistral",
    read=lambda config: config.refuse_windows(4096).read_decoder(),
    random_fields=lambda random: {**with_head_size(random), "sliding_window": None},
)


# SmolLM3: some layers have no positions. rollout/models/sglang_classes.py serves it.


def read_smollm3(config: ConfigJson) -> Architecture:
    config.ignore("sliding_window")
    num_layers, every = config.read_size("num_hidden_layers"), config.read_size("no_rope_layer_interval", 4)
    turned = config.get("no_rope_layers", [int((layer + 1) % every != 0) for layer in range(num_layers)])
    if len(turned) != num_layers or not set(turned) <= {0, 1}:
        raise ValueError(f"{config.path}: no_rope_layers is {turned!r}; 0 or 1 for each of {num_layers} layers")
    tied = config.read_flag("tie_word_embeddings", True)
    return config.read_decoder(rope=config.read_rope(2e6), unturned=tuple(not x for x in turned), tied=tied)


SMOLLM3 = Family(
    "smollm3",
    hf_class="SmolLM3",
    sglang_module="llama",
    read=read_smollm3,
    random_fields=lambda _: {"no_rope_layer_interval": 2},
)


# Gemma 3's text models (2503.19786): norms before and after, whose weights are 1 + theirs, layers with a window and a
# rope of their own, scaled embeddings, and gates by GELU.


def read_gemma3(config: ConfigJson) -> Architecture:
    config.require("hidden_activation", "gelu_pytorch_tanh")
    config.require("tie_word_embeddings", True)
    every = config.read_size("sliding_window_pattern", config.read_size("_sliding_window_pattern", 6))
    pattern = [(layer + 1) % every != 0 for layer in range(config.read_size("num_hidden_layers"))]
    return config.read_decoder(
        **config.read_windows(pattern, 4096),
        rope=config.read_rope(1e6, "full_attention"),
        local_rope=config.read_local_rope(config.read_number("rope_local_base_freq", 1e4)),
        qk_norm=True,
        output_norms=True,
        head_size=config.read_size("head_dim", 256),
        activation="gelu_tanh",
        embedding_scale=config.read_size("hidden_size") ** 0.5,
        query_size=config.read_number("query_pre_attn_scalar", 256),
        tied=True,
        serves_whole_embedding=True,
    )


GEMMA3 = Family(
    "gemma3_text",
    hf_class="Gemma3",
    hf_classifier="Gemma3TextForSequenceClassification",
    sglang_module="gemma3_causal",
    read=read_gemma3,
    list_weights=lambda arch, _: dense_layer(arch, "pre_feedforward_layernorm", AROUND),
    megatron_fields=lambda _: {"layernorm_zero_centered_gamma": True},
    random_fields=lambda random: {
        **with_head_size(random),
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(random.num_layers)],
        "tie_word_embeddings": True,
    },
    only_values={"use_bidirectional_attention": False, "cache_implementation": "hybrid"},
)


# Phi-4 (2412.08905), of Phi-3's type: one tensor of query, key and value, and one of gate and up.


def read_phi3(config: ConfigJson) -> Architecture:
    rope = config.refuse_windows(0).read_rope()
    if rope.kind == "default":
        config.ignore("original_max_position_embeddings")
    return config.read_decoder(rope=rope, norm_eps=config.read_number("rms_norm_eps", 1e-5))


PHI3 = Family(
    "phi3",
    hf_class="Phi3",
    sglang_module="llama",
    read=read_phi3,
    list_weights=lambda arch, _: dense_layer(arch, fused_qkv=True, fused_mlp=True),
    only_values={"embd_pdrop": 0.0, "resid_pdrop": 0.0},
)


# OLMo 2 (2501.00656): norms of what comes out of attention and MLP alone, and of all query heads together.


def read_olmo2(config: ConfigJson, **changes: Any) -> Architecture:
    config.require("head_dim", config.read_size("hidden_size") // config.read_size("num_attention_heads"))
    eps, norms = config.read_number("rms_norm_eps", 1e-5), {"input_norms": False, "output_norms": True}
    return config.read_decoder(qk_norm=True, joins_heads=True, norm_eps=eps, **norms, **changes)


OLMO2 = Family(
    "olmo2",
    hf_class="Olmo2",
    sglang_module="olmo2",
    read=read_olmo2,
    list_weights=lambda arch, _: dense_layer(arch, outputs=AROUND),
)


# OLMo 3 (2512.13961): OLMo 2 with windows in three of four layers, which no rope_scaling changes.


def read_olmo3(config: ConfigJson) -> Architecture:
    rope, local = config.read_rope(5e5, "full_attention"), config.read_local_rope(5e5)
    # SGLang 0.5.23 takes 10000 in place of rope_parameters, and transformers 500000 for windows in place of rope_theta.
    if (rope, local) != (Rope(1e4), Rope(1e4)) if config.get("rope_parameters") else rope.theta != local.theta:
        raise ValueError(
            f"{config.path}: rope_theta and rope_parameters; SGLang 0.5.23 and transformers compute the same model with"
            " rope_theta 500000 and rope_scaling, as it is published, and no rope_parameters"
        )
    pattern = [(layer + 1) % 4 != 0 for layer in range(config.read_size("num_hidden_layers"))]
    return read_olmo2(config, rope=rope, local_rope=local, **config.read_windows(pattern, 4096))


OLMO3 = replace(
    OLMO2,
    name="olmo3",
    hf_class="Olmo3",
    read=read_olmo3,
    random_fields=lambda random: {
        "sliding_window": 6,
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(random.num_layers)],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
        },
    },
)


# DeepSeek-V3 (2412.19437) and Moonlight: latent attention, and the experts of GLM-4.5 in groups.


def read_deepseek_v3(config: ConfigJson) -> Architecture:
    config.require("attention_bias", False)
    config.require("rope_interleave", True)
    for key in ("aux_loss_alpha", "ep_size", "seq_aux"):
        config.ignore(key)  # Of how it was trained
    # Without them SGLang refuses to start.
    for key, value in {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}.items():
        if config[key] != value:
            config.require(key, value)
    num_heads, turned = config.read_size("num_attention_heads"), config.read_size("qk_rope_head_dim")
    rope = config.read_rope()
    is_whole = rope.mscale and rope.mscale_all_dim and rope.truncate
    if rope.kind not in ("default", "yarn") or (rope.kind == "yarn" and not is_whole):
        what = "yarn with mscale, mscale_all_dim and truncate, or none, is supported: SGLang takes all others for it"
        raise ValueError(f"{config.path}: rope scaling is {rope}; {what}")
    config.require("num_key_value_heads", num_heads)
    # transformers writes what follows from the others.
    config.require("head_dim", turned)
    latent = Latent(
        query_rank=config.read_size("q_lora_rank") if config.get("q_lora_rank") is not None else None,
        rank=config.read_size("kv_lora_rank"),
        content_size=config.read_size("qk_nope_head_dim"),
        turned_size=turned,
        value_size=config.read_size("v_head_dim"),
    )
    size = latent.content_size + latent.turned_size
    config.require("qk_head_dim", size)
    experts = read_sigmoid_experts(config)
    return config.read_decoder(head_size=size, num_kv_heads=num_heads, rope=rope, latent=latent, experts=experts)


def list_deepseek_v3_weights(arch: Architecture, layer: int) -> list[Weight]:
    assert arch.latent is not None
    latent, h, num_heads, inner = arch.latent, arch.hidden_size, arch.num_heads, "self_attention."
    size, joint = num_heads * arch.head_size, latent.rank + latent.turned_size

    def project(name: str, hf_name: str, shape: Shape, split: Split, served: str = "", row: int = 0) -> Weight:
        hf_name = f"self_attn.{hf_name}.weight"
        return Weight(f"self_attention.{name}.weight", (hf_name,), (shape,), split, served, row)

    weights, served, first = [norm("input_layernorm", "input_layernorm", h)], "", latent.query_rank or 0
    if latent.query_rank is None:
        weights.append(project("linear_q_proj", "q_proj", (size, h), Split.rows))
    else:
        # SGLang has both in one tensor.
        served = "self_attn.fused_qkv_a_proj_with_mqa.weight"
        weights += [
            project("linear_q_down_proj", "q_a_proj", (first, h), Split.none, served),
            norm(f"{inner}q_layernorm", "self_attn.q_a_layernorm", first, before=f"{inner}linear_q_up_proj"),
            project("linear_q_up_proj", "q_b_proj", (size, first), Split.rows),
        ]
    weights += [
        project("linear_kv_down_proj", "kv_a_proj_with_mqa", (joint, h), Split.none, served, first),
        norm(f"{inner}kv_layernorm", "self_attn.kv_a_layernorm", latent.rank, before=f"{inner}linear_kv_up_proj"),
        project(
            *("linear_kv_up_proj", "kv_b_proj"),
            (num_heads * (latent.content_size + latent.value_size), latent.rank),
            Split.rows,
        ),
        project("linear_proj", "o_proj", (h, num_heads * latent.value_size), Split.columns),
    ]
    # From the MLP on it is a layer as any other.
    return [*weights, *(x for x in pre_norm_layer(arch, layer) if x.name.startswith(("pre_mlp", "mlp.")))]


def list_latent_fields(arch: Architecture) -> dict[str, Any]:
    """Megatron's fields of latent attention, which has a rope of its own."""
    assert arch.latent is not None
    latent, rope = arch.latent, arch.rope
    return {
        **{"multi_latent_attention": True, "qk_layernorm": True, "v_head_dim": latent.value_size},
        **{"q_lora_rank": latent.query_rank, "kv_lora_rank": latent.rank},
        **{"qk_head_dim": latent.content_size, "qk_pos_emb_head_dim": latent.turned_size},
        **{"rope_type": "yarn" if rope.kind == "yarn" else "rope", "rotary_base": rope.theta},
        **{"rotary_scaling_factor": rope.factor, "beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow},
        "original_max_position_embeddings": int(rope.original_max_position_embeddings),
        **{"mscale": rope.mscale or 1.0, "mscale_all_dim": rope.mscale_all_dim or 0.0},
    }


def deepseek_v3_random_fields(random: RandomModelConfig) -> dict[str, Any]:
    """Heads of which positions turn two thirds."""
    size = random.hidden_size // random.num_heads
    return {
        **sigmoid_experts_random_fields(random),
        "num_key_value_heads": random.num_heads,
        **{"q_lora_rank": random.hidden_size // 2, "kv_lora_rank": random.hidden_size // 4},
        **{"qk_rope_head_dim": size, "qk_nope_head_dim": max(1, size // 2), "v_head_dim": size},
        **{"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    }


DEEPSEEK_CODE = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    **{f"AutoModel{x}": f"modeling_deepseek.DeepseekV3{x or 'Model'}" for x in ("", "ForCausalLM")},
}
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    hf_class="DeepseekV3",
    sglang_module="deepseek_v2",
    read=read_deepseek_v3,
    list_weights=list_deepseek_v3_weights,
    megatron_fields=list_latent_fields,
    random_fields=deepseek_v3_random_fields,
    has_experts=True,
    only_values={"auto_map": DEEPSEEK_CODE},
    server_options={"disable_shared_experts_fusion": True},
)


# gpt-oss (2508.10925): sinks, windows in every other layer, biases everywhere, clamped gates. A tensor holds all
# experts of a layer, transposed, with gate and up rows by turns.


def read_gpt_oss(config: ConfigJson) -> Architecture:
    config.require("attention_bias", True)
    config.require("tie_word_embeddings", False)
    config.require("swiglu_alpha", 1.702)
    if (found := config.get("quantization_config")) is not None:
        raise ValueError(
            f"{config.path}: quantization_config is {found!r}; weights that are trained are not quantized: save them as"
            " bfloat16, GptOssForCausalLM.from_pretrained(..., quantization_config=Mxfp4Config(dequantize=True)),"
            " which transformers does on a CPU too"
        )
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        raise ValueError(f"{config.path}: rope_scaling is missing; transformers would take yarn with a factor of 32")
    experts = Experts(
        num_experts=config.read_size_of("num_local_experts", "num_experts"),
        # openai's own files have both names.
        top_k=config.read_size_of("num_experts_per_tok", "experts_per_token"),
        ffn_size=config.read_size("intermediate_size"),
        normalized=True,
    )
    pattern = [layer % 2 == 0 for layer in range(config.read_size("num_hidden_layers"))]
    return config.read_decoder(
        **config.read_windows(pattern, 128),
        rope=config.read_rope(150000.0),
        head_size=config.read_size("head_dim", 64),
        norm_eps=config.read_number("rms_norm_eps", 1e-5),
        qkv_bias=True,
        has_biases=True,
        activation="quick_gelu",
        clamp=config.read_number("swiglu_limit", 7.0),
        experts=config.check_experts(experts),
    )


def list_gpt_oss_weights(arch: Architecture, layer: int) -> list[Weight]:
    assert arch.experts is not None
    h, num, size = arch.hidden_size, arch.experts.num_experts, arch.experts.ffn_size

    def share(kind: str, hf_name: str, shapes: tuple[Shape, ...], served: str) -> Weight:
        parts = tuple(f"mlp.experts.{hf_name}#{{}}/{num},{part}/{len(shapes)}" for part in range(len(shapes)))
        is_first = len(shapes) == 2
        # Split by the rows of the experts, of which those biases that are added last have none.
        split = Split.gate_up if is_first else Split.columns if kind == "weight" else Split.none
        name = f"mlp.experts.{{}}.linear_fc{1 if is_first else 2}.{kind}"
        return Weight(name, parts, shapes, split, f"mlp.experts.{served}", per_expert=True, interleaved=is_first)

    return [
        norm("input_layernorm", "input_layernorm", h, before="self_attention.linear_qkv"),
        *attention(arch),
        norm("pre_mlp_layernorm", "post_attention_layernorm", h),
        Weight("mlp.router.weight", ("mlp.router.weight",), ((num, h),)),
        Weight("mlp.router.bias", ("mlp.router.bias",), ((num,),)),
        share("weight", "gate_up_proj", ((size, h),) * 2, "w13_weight"),
        share("bias", "gate_up_proj_bias", ((size,),) * 2, "w13_weight_bias"),
        share("weight", "down_proj", ((h, size),), "w2_weight"),
        share("bias", "down_proj_bias", ((h,),), "w2_weight_bias"),
    ]


GPT_OSS = Family(
    "gpt_oss",
    hf_class="GptOss",
    sglang_module="gpt_oss",
    read=read_gpt_oss,
    list_weights=list_gpt_oss_weights,
    random_fields=lambda random: {
        **with_head_size(random),
        "num_local_experts": random.num_experts,
        "num_experts_per_tok": random.experts_per_token,
        "sliding_window": 6,
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
            "truncate": False,
        },
        "tie_word_embeddings": False,
    },
    has_experts=True,
    only_values={"initial_context_length": 4096},
    # Other ways to compute the experts keep them in another form.
    server_options={"moe_runner_backend": "triton"},
    cpu_options={"attention_backend": "intel_amx", "disable_hybrid_swa_memory": True},
)


FAMILIES = {
    family.name: family
    for family in (
        *(DEEPSEEK_V3, GEMMA3, GLM4, GLM4_MOE, GPT_OSS, GRANITE, LLAMA, MISTRAL, OLMO2, OLMO3, PHI3),
        *(QWEN2, QWEN3, QWEN3_MOE, SMOLLM3),
    )
}
"""Descriptors by the model_type of config.json"""
MISSING = {
    "qwen3_next qwen3_5_text qwen3_5_moe_text": "gated delta layers take no packed sequences in Megatron-Core 0.16.1,"
    " but in releases from June 2026 on (NVIDIA/Megatron-LM#2645)",
    "deepseek_v32 glm_moe_dsa": "sparse attention (DSA) takes no packed sequences in Megatron-Core 0.16.1",
    "ministral3": "queries are scaled by their position (llama_4_scaling_beta), which Megatron-Core 0.16.1 lacks",
}
"""What a family of this model_type, or of another, waits for"""


def parse_architecture(content: dict[str, Any], path: Path) -> Architecture:
    """Read the content of a config.json; `path` is what the messages name.

    Raises ValueError that names the key where the model is of no family here, uses something that is not built, or has
    a key that is not read and could change the model.
    """
    return _parse(content, path)[0]


def list_unknown_keys(content: dict[str, Any], path: Path) -> list[str]:
    """A message for each key of a config.json that `parse_architecture` takes and that nothing here knows."""
    return _parse(content, path)[1]


def _parse(content: dict[str, Any], path: Path) -> tuple[Architecture, list[str]]:
    name = content.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        nested = content.get("text_config")
        inner = nested.get("model_type") if isinstance(nested, dict) else None
        missing = f"text_config has its text model, a {inner!r}; save that one alone" if inner else None
        missing = next((why for names, why in MISSING.items() if {name, inner} & {*names.split()}), missing)
        why = f": {missing}" if missing else ""
        raise ValueError(f"{path}: model_type is {name!r}{why}; supported: {', '.join(FAMILIES)}")
    config = ConfigJson(content, path)
    architecture = FAMILIES[name].read(config)
    return architecture, config.check_rest(FAMILIES[name].only_values)


@lru_cache(maxsize=4096)
def list_weights(arch: Architecture, layer: int) -> tuple[Weight, ...]:
    """The table of a layer."""
    return tuple(FAMILIES[arch.family].list_weights(arch, layer))


def build_random_fields(random: RandomModelConfig, vocab_size: int) -> dict[str, Any]:
    """The config.json of a random model, as its class in transformers takes it."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": random.hidden_size,
        "intermediate_size": random.ffn_size,
        "num_hidden_layers": random.num_layers,
        "num_attention_heads": random.num_heads,
        "num_key_value_heads": random.num_kv_heads,
        "max_position_embeddings": random.max_length,
        "tie_word_embeddings": random.tie_embeddings,
        "initializer_range": random.init_std,
        **FAMILIES[random.family].random_fields(random),
    }
