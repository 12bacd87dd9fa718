"""The planner counts the published numbers of parameters in the published configs of the dense families."""

from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema.roles import Dtype, ParallelConfig
from megarl.mcore.model import count_stages
from megarl.models.families import list_unknown_keys, parse_architecture

LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
LLAMA31 = {"rope_theta": 5e5, "rope_scaling": LLAMA3, "mlp_bias": False}
QWEN2 = {"rope_theta": 1e4, "use_sliding_window": False, "sliding_window": 4096, "use_mrope": False}
GEMMA3 = {
    **{"head_dim": 256, "query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    **{"sliding_window": 512, "sliding_window_pattern": 6, "hidden_activation": "gelu_pytorch_tanh"},
}
MODELS: dict[str, tuple[int, str, tuple[int, ...], dict[str, Any]]] = {
    "Llama-3.1-8B": (8_030_261_248, "llama", (32, 4096, 14336, 32, 8, 128256, 131072), LLAMA31),
    "Llama-3.3-70B": (70_553_706_496, "llama", (80, 8192, 28672, 64, 8, 128256, 131072), LLAMA31),
    "R1-Distill-Qwen-1.5B": (1_777_088_000, "qwen2", (28, 1536, 8960, 12, 2, 151936, 131072), QWEN2),
    "Qwen2.5-Math-7B": (7_615_616_512, "qwen2", (28, 3584, 18944, 28, 4, 152064, 4096), QWEN2),
    "Mistral-7B-v0.3": (7_248_023_552, "mistral", (32, 4096, 14336, 32, 8, 32768, 32768), {"sliding_window": None}),
    # Heads that are not hidden_size / num_attention_heads wide
    "Mistral-Nemo": (
        *(12_247_782_400, "mistral", (40, 5120, 14336, 32, 8, 131072, 131072)),
        {"head_dim": 128, "sliding_window": None},
    ),
    "Ministral-8B": (8_019_808_256, "mistral", (36, 4096, 12288, 32, 8, 131072, 32768), {"sliding_window": 32768}),
    "SmolLM3-3B": (
        *(3_075_098_624, "smollm3", (36, 2048, 11008, 16, 4, 128256, 65536)),
        {"rope_theta": 5e6, "no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4},
    ),
    "gemma-3-1b": (999_885_952, "gemma3_text", (26, 1152, 6912, 4, 1, 262144, 32768), GEMMA3),
    "phi-4": (
        *(14_659_507_200, "phi3", (40, 5120, 17920, 40, 10, 100352, 16384)),
        {"rope_theta": 250000, "original_max_position_embeddings": 16384, "sliding_window": None},
    ),
    "OLMo-2-7B": (7_298_617_344, "olmo2", (32, 4096, 11008, 32, 32, 100352, 4096), {"rope_theta": 5e5}),
}
SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings"),
)


@pytest.mark.parametrize("name", MODELS)
def test_the_planner_counts_the_published_number_of_parameters(name: str) -> None:
    number, family, sizes, others = MODELS[name]
    content = {"model_type": family, **dict(zip(SIZES, sizes, strict=True)), **others}
    arch = parse_architecture(content, Path(name))
    assert list_unknown_keys(content, Path(name)) == []
    assert count_stages(arch, ParallelConfig(), Dtype.bfloat16, {}, False)[0].total == number


def test_only_windows_shorter_than_the_longest_sequence_count() -> None:
    def read(family: str, **changes: Any) -> Any:
        content = {"model_type": family, **dict(zip(SIZES, (26, 1152, 6912, 4, 1, 262144, 32768), strict=True))}
        return parse_architecture({**content, **changes}, Path("config.json"))

    gemma = read("gemma3_text", **GEMMA3)
    assert (gemma.window, gemma.windowed.count(False), gemma.windowed[5]) == (512, 4, False)
    for family, changes in (("mistral", {}), ("mistral", {"sliding_window": 4096}), ("phi3", {"sliding_window": 2047})):
        with pytest.raises(ValueError, match=r"sliding_window is .* SGLang 0.5.23 serves this family"):
            read(family, **changes)
