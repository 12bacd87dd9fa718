"""What a Hugging Face config.json says of a model, for the families that Megatron is set up for here."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.checks.parallel import find_nearest_divisor
from megarl.config.schema.roles import ParallelConfig

FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama")


@dataclass(frozen=True)
class Experts:
    """The mixture of experts that stands in every layer where a dense model has its MLP."""

    num_experts: int
    top_k: int
    """Experts of each token"""
    ffn_size: int
    """Of one expert"""
    normalized: bool
    """The weights of a token's experts are their softmax probabilities divided by their sum, not as they are."""


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
    experts: Experts | None = None
    """None: a dense model"""


def check_layout(
    arch: Architecture, parallel: ParallelConfig, key: str, megatron: Mapping[str, Any] | None = None
) -> list[str]:
    """What of the model the layout under the configuration key `key` does not divide; one message each.

    megatron: model.megatron, which may say how many layers the first and last stage have.
    """
    problems = []
    fitting = [tp for tp in range(1, arch.num_heads + 1) if not _find_undivided(arch, tp)]
    for name in _find_undivided(arch, parallel.tp):
        nearest = min(fitting, key=lambda tp: (abs(tp - parallel.tp), tp))
        problems.append(f"{key}.tp: found {parallel.tp}, which does not divide {name}; the nearest is {nearest}")
    problems += _check_stages(arch, parallel, key, megatron or {})
    if parallel.sp and parallel.tp == 1:
        problems.append(f"{key}.sp: found true with tp 1; it splits what tensor parallelism leaves whole")
    return [*problems, *_check_expert_layout(arch.experts, parallel, key)]


def _find_undivided(arch: Architecture, tp: int) -> list[str]:
    """What tensor parallelism cannot split. Megatron repeats key-value heads where there are fewer than ranks."""
    kv_heads = arch.num_kv_heads
    rows = {
        f"the model's {arch.num_heads} attention heads": arch.num_heads % tp,
        f"the model's {kv_heads} key-value heads": kv_heads % tp and tp % kv_heads,
        "the rows of its query, key and value weights": (arch.num_heads + 2 * kv_heads) * arch.head_size % tp,
        f"its {arch.ffn_size} rows of an MLP": 0 if arch.experts else arch.ffn_size % tp,
    }
    return [name for name, rest in rows.items() if rest]


# With these Megatron itself knows better which layers a stage has.
_STAGE_OPTIONS = (
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def _check_stages(arch: Architecture, parallel: ParallelConfig, key: str, megatron: Mapping[str, Any]) -> Iterator[str]:
    """The first and the last stage may have numbers of layers of their own; the others share what is left."""
    if any(megatron.get(option) for option in _STAGE_OPTIONS):
        return
    options = [f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last")]
    own = [megatron[option] for option in options if megatron.get(option) is not None]
    layers, stages = arch.num_layers - sum(own), parallel.pp - len(own)
    if own and (stages < 0 or layers < 0 or (stages == 0) != (layers == 0)):
        yield (
            f"{key}.pp: found {parallel.pp}, with {' and '.join(map(str, own))} of the model's {arch.num_layers} layers"
            f" in the first and last stage (model.megatron.{options[0]} and .{options[1]}); {layers} layers are left"
            f" for {stages} stages"
        )
        return
    if stages and layers % stages:
        nearest = find_nearest_divisor(layers, stages) + len(own)
        yield (
            f"{key}.pp: found {parallel.pp}, which does not divide the model's {layers} layers"
            f"{' outside the first and last stage' if own else ''}; the nearest is {nearest}, or give the first and"
            f" last stage numbers of their own (model.megatron.{options[0]} and .{options[1]})"
        )
        return
    for number in [*own, *([layers // stages] if stages else [])]:
        if number % parallel.vpp:
            yield (
                f"{key}.vpp: found {parallel.vpp}, which does not divide the {number} layers of a stage; the nearest is"
                f" {find_nearest_divisor(number, parallel.vpp)}"
            )


def _check_expert_layout(experts: Experts | None, parallel: ParallelConfig, key: str) -> list[str]:
    if experts is None:
        return [
            f"{key}.{name}: found {value}, but the model has no experts; it must be 1"
            for name, value in (("ep", parallel.ep), ("etp", parallel.etp))
            if value != 1
        ]
    problems = []
    for name, value, number, what in (
        ("ep", parallel.ep, experts.num_experts, "experts"),
        ("etp", parallel.etp, experts.ffn_size, "rows of each expert"),
    ):
        if number % value:
            problems.append(f"{key}.{name}: found {value}, which does not divide the model's {number} {what}")
    if parallel.tp > 1 and not parallel.sp:
        # Without it every tensor-parallel rank would send the same tokens to the experts.
        problems.append(f"{key}.sp: found false with tp {parallel.tp}; a model of experts needs true")
    return problems


def read_architecture(directory: Path) -> Architecture:
    """Read DIRECTORY/config.json.

    Raises FileNotFoundError where it is missing, ValueError that names the key where the model is not one of
    `FAMILIES` or uses something that is not built here.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not found; a Hugging Face checkpoint directory is expected")
    return parse_architecture(json.loads(path.read_text()), path)


def parse_architecture(config: dict[str, Any], path: Path) -> Architecture:
    """Of the content of a config.json; `path` is what the messages name. Raises ValueError as `read_architecture`."""
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
        qk_norm=family in ("qwen3", "qwen3_moe"),
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=_read_experts(config, path) if family == "qwen3_moe" else None,
    )


def _read_experts(config: dict[str, Any], path: Path) -> Experts:
    """transformers 5 writes num_local_experts, earlier ones num_experts."""
    experts = Experts(
        num_experts=config.get("num_experts") or config["num_local_experts"],
        top_k=config["num_experts_per_tok"],
        ffn_size=config["moe_intermediate_size"],
        normalized=bool(config.get("norm_topk_prob", False)),
    )
    for key, value in {"decoder_sparse_step": 1, "mlp_only_layers": []}.items():
        if config.get(key) not in (value, None):
            raise ValueError(f"{path}: {key} is {config[key]!r}; only {value!r}, experts in every layer, is supported")
    if not 1 <= experts.top_k <= experts.num_experts:
        raise ValueError(
            f"{path}: num_experts_per_tok is {experts.top_k}, num_experts {experts.num_experts}; it must be 1 to that"
        )
    if experts.top_k == 1 and experts.normalized:
        raise ValueError(
            f"{path}: num_experts_per_tok is 1 and norm_topk_prob true: the only weight is always 1,"
            " and nothing trains the router; norm_topk_prob must be false"
        )
    return experts


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
