"""The parameters of a whole model: their names in Megatron and in Hugging Face checkpoints, and how they are split.

Megatron keeps query, key and value of a key-value head together (linear_qkv: for each group its query heads,
its key head, its value head) and gate and up projections stacked (linear_fc1); both are split over
tensor-parallel ranks. Experts lie over expert-parallel ranks, each split over the expert-tensor-parallel ones.
Imports no Megatron.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.mcore.model.architecture import Architecture
from megarl.mcore.weights.hf_critic import VALUE_HEAD

# The vocabulary is padded to a multiple of this, so that checkpoints of different layouts have the same
# shapes.
VOCAB_MULTIPLE = 64

_LAYER_NAMES: dict[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
    "self_attention.linear_qkv.bias": tuple(f"self_attn.{x}_proj.bias" for x in "qkv"),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
    "mlp.router.weight": ("mlp.gate.weight",),
}
_EXPERT_NAMES: dict[str, tuple[str, ...]] = {
    "linear_fc1.weight": ("gate_proj.weight", "up_proj.weight"),
    "linear_fc2.weight": ("down_proj.weight",),
}
_OTHER_NAMES: dict[str, str] = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}


@dataclass(frozen=True)
class Entry:
    """One parameter of the whole model."""

    name: str
    """Megatron's name with global layer and expert numbers, for example decoder.layers.3.mlp.linear_fc1.weight or
    decoder.layers.3.mlp.experts.17.linear_fc1.weight
    """
    hf_names: tuple[str, ...]
    split: str
    """How tensor parallelism splits it: none, rows, columns, vocab (padded rows), qkv or gate_up"""
    expert: int | None = None
    """Global number of the expert that it belongs to"""


def describe(name: str, with_value_head: bool) -> Entry:
    """The entry of a parameter by its Megatron name (global layer and expert numbers). Raises KeyError for an
    unknown one.
    """
    if with_value_head and name == "output_layer.weight":
        return Entry(name, (VALUE_HEAD,), "none")
    if name in _OTHER_NAMES:
        return Entry(name, (_OTHER_NAMES[name],), "none" if "norm" in name else "vocab")
    _, _, number, suffix = name.split(".", 3)
    if suffix.startswith("mlp.experts."):
        expert, weight = suffix.removeprefix("mlp.experts.").split(".", 1)
        hf_names = tuple(f"model.layers.{number}.mlp.experts.{expert}.{hf}" for hf in _EXPERT_NAMES[weight])
        return Entry(name, hf_names, "gate_up" if len(hf_names) == 2 else "columns", int(expert))
    hf_names = tuple(f"model.layers.{number}.{hf}" for hf in _LAYER_NAMES[suffix])
    if "linear_qkv." in suffix and "layer_norm" not in suffix:
        return Entry(name, hf_names, "qkv")
    splits = {"linear_fc1.weight": "gate_up", "linear_proj.weight": "columns", "linear_fc2.weight": "columns"}
    return Entry(name, hf_names, splits.get(suffix.split(".", 1)[1] if "." in suffix else suffix, "none"))


def list_entries(arch: Architecture, with_value_head: bool) -> list[Entry]:
    """Every parameter of the whole model once, layer by layer, with the names that Megatron's checkpoints have.

    A layer's input norm belongs to linear_qkv there, the norm before a dense MLP to linear_fc1.
    """
    names = [f"linear_qkv.{kind}" for kind in ("layer_norm_weight", "weight", *(["bias"] if arch.qkv_bias else []))]
    names += ["linear_proj.weight", *(["q_layernorm.weight", "k_layernorm.weight"] if arch.qk_norm else [])]
    names = [f"self_attention.{name}" for name in names]
    if arch.experts is None:
        names += ["mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
    else:
        names += ["pre_mlp_layernorm.weight", "mlp.router.weight"]
        names += [f"mlp.experts.{e}.linear_fc{i}.weight" for e in range(arch.experts.num_experts) for i in (1, 2)]
    layers = [f"decoder.layers.{layer}.{name}" for layer in range(arch.num_layers) for name in names]
    head = [] if arch.tied and not with_value_head else ["output_layer.weight"]
    ends = ["embedding.word_embeddings.weight", *layers, "decoder.final_layernorm.weight", *head]
    return [describe(name, with_value_head) for name in ends]


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    multiple = math.lcm(VOCAB_MULTIPLE, tp)
    return math.ceil(vocab_size / multiple) * multiple


def to_megatron(entry: Entry, tensors: list[Tensor], arch: Architecture, tp: int, tp_rank: int) -> Tensor:
    """Whole Hugging Face tensors -> this tensor-parallel rank's shard."""
    if entry.split == "qkv":
        heads = arch.num_kv_heads
        grouped = torch.cat([x.reshape(heads, -1, *x.shape[1:]) for x in tensors], dim=1)
        # With fewer key-value heads than ranks the cuts are within a group.
        return grouped.reshape(-1, *tensors[0].shape[1:]).chunk(tp)[tp_rank]
    if entry.split == "gate_up":
        return torch.cat([x.chunk(tp)[tp_rank] for x in tensors])
    (whole,) = tensors
    if entry.split == "columns":
        return whole.chunk(tp, dim=1)[tp_rank]
    if entry.split == "vocab":
        size = padded_vocab_size(arch.vocab_size, tp) // tp
        shard = whole[tp_rank * size : (tp_rank + 1) * size]
        if len(shard) == size:
            return shard
        return torch.cat([shard, shard.new_zeros(size - len(shard), *whole.shape[1:])])
    return whole


def to_hf(entry: Entry, shards: list[Tensor], arch: Architecture) -> list[tuple[str, Tensor]]:
    """The shards of all tensor-parallel ranks -> whole Hugging Face tensors by name."""
    if entry.split == "qkv":
        whole = torch.cat(shards)
        grouped = whole.reshape(arch.num_kv_heads, -1, arch.head_size, *whole.shape[1:])
        sizes = [arch.num_heads // arch.num_kv_heads, 1, 1]
        parts = [x.reshape(-1, *whole.shape[1:]) for x in grouped.split(sizes, dim=1)]
    elif entry.split == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        parts = [torch.cat([half[i] for half in halves]) for i in range(2)]
    elif entry.split == "columns":
        parts = [torch.cat(shards, dim=1)]
    elif entry.split == "vocab":
        # The largest of all parameters: not copied where it is whole already.
        parts = [(shards[0] if len(shards) == 1 else torch.cat(shards))[: arch.vocab_size]]
    else:
        parts = [shards[0]]
    return [(name, part.contiguous()) for name, part in zip(entry.hf_names, parts, strict=True)]


def compute_shape(hf_name: str, arch: Architecture) -> tuple[int, int]:
    """Rows and columns of a whole Hugging Face tensor; 1 column of a vector. Raises KeyError for an unknown one."""
    h, heads, kv_heads = arch.hidden_size, arch.num_heads * arch.head_size, arch.num_kv_heads * arch.head_size
    ffn_size = arch.experts.ffn_size if arch.experts else arch.ffn_size
    *path, kind = hf_name.split(".")
    if path[-1].endswith("norm"):
        return (arch.head_size if path[-1] in ("q_norm", "k_norm") else h), 1
    shapes = {
        "embed_tokens": (arch.vocab_size, h),
        "lm_head": (arch.vocab_size, h),
        "q_proj": (heads, h),
        "k_proj": (kv_heads, h),
        "v_proj": (kv_heads, h),
        "o_proj": (h, heads),
        "gate_proj": (ffn_size, h),
        "up_proj": (ffn_size, h),
        "down_proj": (h, ffn_size),
        "gate": (arch.experts.num_experts if arch.experts else 0, h),
        "score": (1, h),
    }
    rows, cols = shapes[path[-1]]
    return (rows, 1) if kind == "bias" else (rows, cols)


def compute_hf_shape(hf_name: str, arch: Architecture) -> tuple[int, ...]:
    """The shape of a whole Hugging Face tensor. Raises KeyError for an unknown one."""
    rows, cols = compute_shape(hf_name, arch)
    return (rows,) if "norm." in hf_name or hf_name.endswith(".bias") else (rows, cols)


def compute_megatron_shape(entry: Entry, arch: Architecture, tp: int) -> tuple[int, ...]:
    """The shape of the whole parameter in Megatron, before tensor parallelism splits it over `tp` ranks."""
    shapes = [compute_hf_shape(name, arch) for name in entry.hf_names]
    rows = padded_vocab_size(arch.vocab_size, tp) if entry.split == "vocab" else sum(shape[0] for shape in shapes)
    return (rows, *shapes[0][1:])
