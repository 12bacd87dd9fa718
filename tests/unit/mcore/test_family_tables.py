"""What the descriptors of the families read of config.json, and what they refuse."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import build_fields

from megarl.mcore.checkpoints import describe, list_entries
from megarl.models.architecture import EFFECTIVE, ONLY_VALUES, SECTIONS, WITHOUT_EFFECT, Architecture, Experts
from megarl.models.families import DEEPSEEK_CODE, FAMILIES, list_unknown_keys, list_weights, parse_architecture
from megarl.models.rope import Rope


def read(family: str, **changes: Any) -> Architecture:
    return parse_architecture({"model_type": family, **build_fields(family), **changes}, Path("config.json"))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("glm4_moe", {"n_group": 3}, "config.json: n_group is 3, topk_group 1 and num_experts_per_tok 2; .* divide 4"),
        ("glm4_moe", {"topk_group": 2}, "topk_group 2 and num_experts_per_tok 2; .* must be 2"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4.*; weights that are trained are not"),
        ("gpt_oss", {"rope_parameters": None}, "rope_scaling is missing"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5; only 1.702"),
        ("gpt_oss", {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ("deepseek_v3", {"topk_method": None}, "topk_method is missing"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy'; only 'noaux_tc'"),
        ("deepseek_v3", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1; only 0"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2; only 4"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is False"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ("deepseek_v3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "linear.*; yarn with mscale"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob is False; only True"),
        ("glm4_moe", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1; only 0"),
        ("glm4_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, num_experts 4"),
        ("glm4_moe", {"first_k_dense_replace": 2}, "first_k_dense_replace is 2; it must be below num_hidden_layers, 2"),
        ("glm4_moe", {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2; only 1"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "norm_topk_prob must be false"),
        ("olmo3", {"rope_parameters": None, "rope_theta": 1e6}, "rope_theta and .* with rope_theta 500000 and"),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}},
            "rope_theta and rope_parameters; SGLang",
        ),
        ("llama", {"sliding_window": 16}, "sliding_window is 16"),
        ("llama", {"attention_bias": True}, "attention_bias is True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("llama", {"model_type": "gpt2"}, f"model_type is 'gpt2'; supported: {', '.join(FAMILIES)}"),
        ("llama", {"model_type": "qwen3_next"}, "gated delta layers .* in Megatron-Core 0.16.1, but in releases from"),
        ("llama", {"model_type": "glm_moe_dsa"}, r"sparse attention \(DSA\) takes no packed sequences"),
        ("llama", {"model_type": "ministral3"}, "which Megatron-Core 0.16.1 lacks"),
        ("llama", {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "a 'gemma3_text'; save"),
        ("llama", {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}, "gated delta layers take"),
    ],
)
def test_a_model_that_is_not_built_is_refused_by_key(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(family, **changes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("dual_chunk_attention_config", {"chunk_size": 8192}),
        ("attention_chunk_size", 16),
        ("quantization_config", {}),
        ("compression_config", {"format": "int-quantized"}),
        ("auto_map", {"AutoModelForCausalLM": "modeling.Model"}),
        ("text_config", None),
        ("vision_config", {"depth": 2}),
        ("v_head_dim", 8),
        ("per_layer_config", {"0": {"head_dim": 8}}),
        ("rope_is_neox_style", False),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("original_max_position_embeddings", 64),
        ("logits_scaling", 8.0),
        ("num_attention_heads", "4"),
        ("tie_word_embeddings", "false"),
        ("partial_rotary_factor", 0.25),
    ],
)
def test_a_key_by_which_one_engine_computes_something_else_is_refused_by_name(
    family: str, key: str, value: Any
) -> None:
    changes: dict[str, Any] = {}
    if family == "deepseek_v3" and key == "v_head_dim":
        assert read(family, v_head_dim=8).value_size == 8
        return
    if family.startswith("glm4") and key == "partial_rotary_factor":
        assert read(family, partial_rotary_factor=0.25).rotary_share == 0.25
        return
    if family == "granite" and key == "logits_scaling":
        assert read(family, logits_scaling=8.0).logits_scale == 0.125
        return
    if family == "phi3" and key == "original_max_position_embeddings":
        changes = {"rope_scaling": YARN}  # Without scaling it has no effect.
    if build_fields(family).get("sliding_window") and key == "layer_types":
        assert read(family, **{key: value}).windowed == (False, True)
        return
    with pytest.raises(ValueError, match=f"config.json: .*{key}"):
        read(family, **{key: value}, **changes)


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_of_no_effect_neutral_values_and_nulls_are_taken(family: str) -> None:
    neutral = {"attn_logit_softcapping": None, "logits_scaling": 1.0, "quantization_config": None, "temperature": 0.6}
    if family == "granite":
        del neutral["logits_scaling"]
    # A sliding window is ignored only where transformers drops it.
    window = {"sliding_window": 16} if family.startswith(("qwen", "smollm3")) else {}
    assert read(family, **neutral, **window, use_mrope=False, rope_scaling=None, pretraining_tp=2) == read(family)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN}, ".*say different things"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ".* SGLang 0.5.23 at every length"),
        ({"rope_parameters": {"rope_type": "longrope"}}, ".*which no Megatron-Core up to 0.16.1 computes"),
        ({"rope_parameters": {**YARN, "attention_factor": 1.5}}, ".*attention_factor is 1.5, which SGLang does not"),
        ({"rope_parameters": {**YARN, "factor": None}}, "rope_parameters.factor is None; a number above 0"),
        ({"rope_parameters": {"rope_theta": None}, "rope_theta": 5e5}, "rope_parameters.rope_theta is None"),
        ({"rope_theta": None}, "rope_theta is None"),
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"rope_type": "default"}}, ".*say different things"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 5e5}, ".*rope_theta, .*say different things"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1]}}, "rope_parameters has mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters has full_attention"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; an object was expected"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, "rope_parameters.rope_theta is '1e6'; a number above 0"),
    ],
)
def test_positions_that_the_engines_could_read_differently_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        read("qwen3", **changes)


LLAMA3 = {
    **{"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"},
    "original_max_position_embeddings": 8192,
}
DEFAULT = {"rope_type": "default", "rope_theta": 1e6}
LINEAR = Rope(2e6, "linear", 8.0)
NESTED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
}
EXPERTS = Experts(num_experts=8, top_k=2, ffn_size=48, normalized=True)


@pytest.mark.parametrize(
    ("family", "changes", "field", "value"),
    [
        ("llama", {"rope_theta": 5e5}, "rope", Rope(5e5)),
        ("llama", {"rope_parameters": DEFAULT}, "rope", Rope(1e6)),
        ("llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3}, "rope", Rope(5e5, "llama3", 32.0)),
        ("qwen3", {"rope_parameters": DEFAULT, "rope_scaling": DEFAULT, "rope_theta": 1e6}, "rope", Rope(1e6)),
        ("gemma3_text", {"rope_local_base_freq": 2e4}, "local_rope", Rope(2e4)),
        ("gemma3_text", {"rope_theta": 2e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "rope", LINEAR),
        ("gemma3_text", {"rope_parameters": NESTED}, "rope", LINEAR),
        ("gemma3_text", {"rope_parameters": NESTED}, "local_rope", Rope(3e4)),
        ("gemma3_text", {"sliding_window": 512}, "window", 0),
        ("olmo3", {"rope_parameters": None}, "local_rope", Rope(5e5)),
        ("gemma3_text", {"layer_types": None}, "windowed", (True, True)),
        # The least that a server may take for the longest sequence.
        ("llama", {"seq_length": 64}, "max_length", 64),
        ("qwen3_moe", {"num_experts": 8}, "experts", EXPERTS),
        ("qwen3_moe", {"num_experts": None, "num_local_experts": 8}, "experts", EXPERTS),
    ],
)
def test_both_spellings_of_a_key_are_read(family: str, changes: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(read(family, **changes), field) == value


PUBLISHED_KEYS = {
    "qwen2": {"use_mrope": False, "max_window_layers": 21, "sliding_window": 32768, "use_sliding_window": False},
    "qwen3": {"max_window_layers": 28, "sliding_window": None, "use_sliding_window": False, "rope_scaling": None},
    "qwen3_moe": {
        **{"decoder_sparse_step": 1, "mlp_only_layers": [], "output_router_logits": False, "qkv_bias": False},
        **{"router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
        **{"max_window_layers": 48, "sliding_window": None, "use_sliding_window": False},
    },
    "llama": {
        **{"mlp_bias": False, "pretraining_tp": 1, "rope_interleaved": False, "is_llama_config": True},
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
        "rope_scaling": LLAMA3,
    },
    "mistral": {"sliding_window": None, "head_dim": 16},
    "granite": {
        **{"attention_bias": False, "mlp_bias": False, "attention_multiplier": 0.0078125, "rope_scaling": None},
        **{"embedding_multiplier": 12.0, "logits_scaling": 16.0, "residual_multiplier": 0.22},
    },
    "smollm3": {
        **{"layer_types": ["full_attention"] * 2, "no_rope_layer_interval": 4, "no_rope_layers": [1, 0]},
        **{"max_window_layers": 28, "mlp_bias": False, "rope_scaling": None, "sliding_window": None},
        **{"use_sliding_window": False, "attention_bias": False},
    },
    "gemma3_text": {
        **{"attention_bias": False, "attn_logit_softcapping": None, "cache_implementation": "hybrid", "head_dim": 16},
        **{"final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256},
        **{"rope_local_base_freq": 10000, "rope_scaling": None, "sliding_window": 512, "sliding_window_pattern": 6},
    },
    "phi3": {
        **{"attention_bias": False, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "original_max_position_embeddings": None},
        **{"partial_rotary_factor": 1.0, "rope_scaling": None, "sliding_window": None},
    },
    "olmo2": {"attention_bias": False, "rope_scaling": None},
    "olmo3": {
        **{"attention_bias": False, "sliding_window": 4096, "rope_parameters": None, "rope_theta": 500000},
        "rope_scaling": {**YARN, "attention_factor": 1.138629436, "beta_fast": 32, "beta_slow": 1},
    },
    "deepseek_v3": {
        **{"auto_map": DEEPSEEK_CODE, "aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "seq_aux": True},
        **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "pretraining_tp": 1, "attention_bias": False},
        **{"rope_theta": 10000, "rms_norm_eps": 1e-6},
        "rope_scaling": {
            **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"},
            "original_max_position_embeddings": 4096,
        },
    },
    "gpt_oss": {
        **{"attention_bias": True, "experts_per_token": 2, "head_dim": 16, "initial_context_length": 4096},
        **{"output_router_logits": False, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0},
        **{"rope_parameters": None, "rope_scaling": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
    },
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5, "head_dim": 16},
    "glm4_moe": {"rope_scaling": None, "partial_rotary_factor": 0.5, "head_dim": 16},
}
"""What the families' published config.json have (Qwen2.5, Qwen3, Qwen3-Coder, Llama 3.2, SmolLM2, GLM-4-0414, GLM-4.5)
beside sizes"""
COMMON_KEYS = {
    **{"_name_or_path": "model", "architectures": ["M"], "attention_dropout": 0.0, "bos_token_id": 0},
    **{"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "torch_dtype": "bfloat16", "use_cache": True},
    **{"transformers_version": "4.51.0", "pad_token_id": 0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_keys_of_published_models_are_all_known(family: str) -> None:
    content = {"model_type": family, **build_fields(family), **COMMON_KEYS, **PUBLISHED_KEYS[family]}
    assert list_unknown_keys(content, Path("config.json")) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_is_read_as_what_it_was_made_of(family: str) -> None:
    import transformers

    fields = {**build_fields(family), "rms_norm_eps": 1e-6}
    written = transformers.CONFIG_MAPPING[family](**fields).to_dict()
    assert parse_architecture(written, Path("config.json")) == read(family, rms_norm_eps=1e-6)
    assert list_unknown_keys(written, Path("config.json")) == []


def test_every_key_that_sglang_reads_of_our_families_is_known_or_refused() -> None:
    root = Path(str(importlib.util.find_spec("sglang").origin)).parent / "srt"  # type: ignore[union-attr]
    modules = {family.sglang_module for family in FAMILIES.values()}
    texts = [(root / "models" / f"{name}.py").read_text() for name in modules]
    texts.append((root / "configs" / "model_config.py").read_text())
    pattern = (
        r'\b(?:getattr|hasattr)\(\s*(?:self\.)?(?:hf_|hf_text_|text_)?config,\s*"(\w+)"|\bhf_(?:text_)?config\.(\w+)'
    )
    names = {a or b for text in texts for a, b in re.findall(pattern, text)}
    assert {"sliding_window", "attention_bias", "dual_chunk_attention_config", "rope_is_neox_style"} <= names
    of_objects = {"get_text_config", "update", "to_dict", "context_len", "items", "__class__"}
    sizes = {"vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads"}
    known = WITHOUT_EFFECT | ONLY_VALUES.keys() | set(SECTIONS) | of_objects | sizes
    assert {name for name in names if name not in known and not EFFECTIVE.search(name)} == set()


def test_the_first_layers_of_glm4_moe_are_dense_and_the_others_have_shared_experts_and_a_bias() -> None:
    arch = read("glm4_moe", n_shared_experts=3)
    dense, mixed = ({weight.name for weight in list_weights(arch, layer)} for layer in range(2))
    assert "mlp.linear_fc1.weight" in dense
    assert not {name for name in dense if "expert" in name or "router" in name}
    assert {"mlp.router.expert_bias", "mlp.experts.{}.linear_fc1.weight"} <= mixed
    entry = describe("decoder.layers.1.mlp.shared_experts.linear_fc1.weight", arch, False)
    assert entry.shapes == ((3 * 48, 64),) * 2
    assert describe("decoder.layers.1.mlp.router.expert_bias", arch, False).is_constant
    fused, name = describe("decoder.layers.0.mlp.linear_fc1.weight", read("glm4"), False), "gate_up_proj.weight"
    assert [(part[0].rpartition("mlp.")[2], *part[1:]) for part in fused.parts] == [
        (name, 0, 96, 64),
        (name, 96, 96, 64),
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_of_a_table_is_found_by_its_name_and_names_no_tensor_twice(family: str) -> None:
    arch = read(family)
    entries = list_entries(arch, False)
    assert [describe(entry.name, arch, False) for entry in entries] == entries
    names = [name for entry in entries for name in entry.hf_names]
    assert len(set(names)) == len(names)
