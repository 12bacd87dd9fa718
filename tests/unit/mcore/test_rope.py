"""Frequencies and attention factors of every kind of rope are those of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import build_fields

from megarl.models.families import parse_architecture
from megarl.models.rope import compute_frequencies

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
SECTIONS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    "llama3_other": {"rope_type": "llama3", "factor": 3.0, **LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 9.0},
    "yarn": {**YARN, "factor": 4.0},
    "yarn_1": {**YARN, "factor": 1.0},
    "gpt_oss": {**YARN, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "deepseek": {**YARN, "factor": 40, "beta_fast": 16, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.7},
    "olmo3": {**YARN, "factor": 8.0, "attention_factor": 1.2079441541679836},
}


@pytest.mark.parametrize("head_size", [64, 128, 80])
@pytest.mark.parametrize("theta", [10000.0, 5e5])
@pytest.mark.parametrize("kind", SECTIONS)
def test_frequencies_and_attention_factor_are_those_of_transformers(kind: str, theta: float, head_size: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    section = {**SECTIONS[kind], "rope_theta": theta}
    config = LlamaConfig(head_dim=head_size, max_position_embeddings=131072, rope_parameters=dict(section))  # type: ignore[no-untyped-call]
    compute = ROPE_INIT_FUNCTIONS.get(section["rope_type"], LlamaRotaryEmbedding.compute_default_rope_parameters)
    frequencies, factor = compute(config)
    for form in ({"rope_parameters": section}, {"rope_theta": theta, "rope_scaling": SECTIONS[kind]}):
        content = {"model_type": "llama", **build_fields("llama"), "head_dim": head_size, **form}
        rope = parse_architecture(content, Path("config.json")).rope
        assert torch.equal(compute_frequencies(rope, head_size), frequencies)
        assert rope.attention_factor == pytest.approx(factor, rel=1e-12)
