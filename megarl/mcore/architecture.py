"""What a Hugging Face config.json says of a model, for the families that Megatron is set up for here."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.roles import ParallelConfig

FAMILIES = ("qwen2", "qwen3", "llama")


@dataclass(frozen=True)
class Architecture:
    """Sizes and variants of a decoder with RMSNorm, rotary positions and SwiGLU."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_length: int
    norm_eps: float
    rope_theta: float
    rope_factor: float | None
    """Llama 3's frequency scaling; None: unscaled"""
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    """The output layer is the embedding."""


def check_layout(arch: Architecture, parallel: ParallelConfig, key: str) -> list[str]:
    """What of the model the layout under the configuration key `key` does not divide; one message each."""
    problems = []
    for name, number in (("attention heads", arch.num_heads), ("key-value heads", arch.num_kv_heads)):
        if number % parallel.tp:
            problems.append(f"{key}.tp: found {parallel.tp}, which does not divide the model's {number} {name}")
    if arch.num_layers % parallel.pp:
        problems.append(f"{key}.pp: found {parallel.pp}, which does not divide the model's {arch.num_layers} layers")
    if parallel.sp and parallel.tp == 1:
        problems.append(f"{key}.sp: found true with tp 1; it splits what tensor parallelism leaves whole")
    return problems


def read_architecture(directory: Path) -> Architecture:
    """Read DIRECTORY/config.json.

    Raises FileNotFoundError where it is missing, ValueError that names the key where the model is not one of
    `FAMILIES` or uses something that is not built here.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not found; a Hugging Face checkpoint directory is expected")
    config = json.loads(path.read_text())
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{path}: model_type is {family!r}; supported: {', '.join(FAMILIES)}")
    _refuse_variants(config, path)
    num_heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
    theta, factor = _rope(config, path)
    return Architecture(
        family=family,
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden_size,
        ffn_size=config["intermediate_size"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_size=config.get("head_dim") or (128 if family == "qwen3" else hidden_size // num_heads),
        vocab_size=config["vocab_size"],
        max_length=config.get("max_position_embeddings", 32768),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_factor=factor,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _refuse_variants(config: dict[str, Any], path: Path) -> None:
    expected = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
    for key, value in expected.items():
        found = config.get(key, value)
        if found not in (value, None):
            raise ValueError(f"{path}: {key} is {found!r}; only {value!r} is supported")


def _rope(config: dict[str, Any], path: Path) -> tuple[float, float | None]:
    """Base and Llama-3 factor. transformers 5 writes rope_parameters, earlier ones rope_theta and
    rope_scaling.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return float(theta), None
    fixed = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
    if kind == "llama3" and all(scaling.get(key) == value for key, value in fixed.items()):
        return float(theta), float(scaling["factor"])
    raise ValueError(f"{path}: rope scaling {scaling!r} is not supported; supported: default, llama3 with {fixed}")
