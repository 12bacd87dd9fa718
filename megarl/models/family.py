"""What is known of a family of models alone: its descriptor, and the rows of its table of tensors.

The mapping of Hugging Face checkpoints, the plan of the weight sync, the planner, the random models and the export read
it and name no family themselves. docs/extending/model-family.md says how to add one.

Megatron keeps query, key and value of a key-value head together (linear_qkv: for each group its query heads, its key
head, its value head) and the gate and up projections stacked (linear_fc1). SGLang stacks the query, key and value heads
of a rank (qkv_proj), its gate and up rows (gate_up_proj), and the experts of a layer (w13_weight and w2_weight). All
names are those within a layer: `self_attn.q_proj.weight` stands for `model.layers.3.self_attn.q_proj.weight`, and `{}`
for the number of an expert.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megarl.config.schema.roles import RandomModelConfig
from megarl.models.architecture import Architecture, ConfigJson, Experts

Shape = tuple[int, ...]


class Split(Enum):
    """How tensor parallelism divides a parameter over its ranks, in training and in serving alike."""

    none = "none"
    """Every rank holds it whole."""
    columns = "columns"
    """Each rank holds its share of the columns."""
    vocab = "vocab"
    """Each rank holds its share of the rows, which are padded."""
    qkv = "qkv"
    """Each rank holds the query heads of its groups, and their key and value heads."""
    gate_up = "gate_up"
    """Each rank holds its share of the gate rows and its share of the up rows."""


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
    saved: str = ""
    """The name in Megatron's checkpoints, and that of Transformer Engine's layers; empty: as `name`"""
    per_expert: bool = False
    """There is one for each expert."""
    is_constant: bool = False
    """A buffer in float32, whatever the dtype of the model, that training leaves as it is"""


def norm(name: str, hf_name: str, size: int, *, before: str | None = None) -> Weight:
    """before: the linear layer with which Transformer Engine fuses the norm."""
    saved = f"{before}.layer_norm_weight" if before else ""
    return Weight(f"{name}.weight", (f"{hf_name}.weight",), ((size,),), saved=saved)


def attention(arch: Architecture) -> list[Weight]:
    """Grouped-query attention; with a bias, and with norms of the heads, where the architecture has them."""
    h, heads, kv_heads = arch.hidden_size, arch.num_heads * arch.head_size, arch.num_kv_heads * arch.head_size
    rows = (heads, kv_heads, kv_heads)
    weights = []
    for kind in ("weight", "bias") if arch.qkv_bias else ("weight",):
        names = tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv")
        shapes: tuple[Shape, ...] = tuple((size, h) if kind == "weight" else (size,) for size in rows)
        name = f"self_attention.linear_qkv.{kind}"
        weights.append(Weight(name, names, shapes, Split.qkv, served=f"self_attn.qkv_proj.{kind}"))
    columns = ("self_attn.o_proj.weight",)
    weights.append(Weight("self_attention.linear_proj.weight", columns, ((h, heads),), Split.columns))
    if arch.qk_norm:
        weights += [norm(f"self_attention.{x}_layernorm", f"self_attn.{x}_norm", arch.head_size) for x in "qk"]
    return weights


def gated_mlp(name: str, hf_name: str, hidden_size: int, ffn_size: int, *, fused: bool = False) -> list[Weight]:
    """down(silu(gate(x)) * up(x)). fused: the Hugging Face checkpoint holds gate and up as one tensor."""
    served = f"{hf_name}.gate_up_proj.weight"
    names: tuple[str, ...] = (f"{hf_name}.gate_proj.weight", f"{hf_name}.up_proj.weight")
    shapes: tuple[Shape, ...] = ((ffn_size, hidden_size), (ffn_size, hidden_size))
    if fused:
        names, shapes = (served,), ((2 * ffn_size, hidden_size),)
    return [
        Weight(f"{name}.linear_fc1.weight", names, shapes, Split.gate_up, served=served),
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
        Weight(gate_up.name, gate_up.hf_names, gate_up.shapes, gate_up.split, "mlp.experts.w13_weight", "", True),
        Weight(down.name, down.hf_names, down.shapes, down.split, "mlp.experts.w2_weight", "", True),
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
    norms = [norm("pre_mlp_layernorm", "post_attention_layernorm", h, before="mlp.linear_fc1")]
    return [*weights, *norms, *gated_mlp("mlp", "mlp", h, arch.ffn_size)]


def with_head_size(random: RandomModelConfig) -> dict[str, Any]:
    """The key of families whose heads need not be hidden_size / num_heads wide."""
    return {"head_dim": random.hidden_size // random.num_heads}


@dataclass(frozen=True)
class Family:
    """One of `FAMILIES` in families.py."""

    name: str
    """model_type of config.json"""
    hf_class: str
    """What the names of its classes in transformers begin with: Qwen3 of Qwen3Config, Qwen3ForCausalLM"""
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
    it is there; beside `config_json.ONLY_VALUES`"""
    server_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the SGLang server without which it would hold other tensors than the table says"""
