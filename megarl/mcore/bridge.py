"""Weights between Hugging Face names and a Megatron model's shards.

Megatron keeps query, key and value of a key-value head together (linear_qkv: for each group its query heads,
its key head, its value head) and gate and up projections stacked (linear_fc1); both are split over
tensor-parallel ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megarl.mcore.architecture import Architecture
from megarl.mcore.checkpoint_reader import CheckpointReader
from megarl.mcore.critic_checkpoint import VALUE_HEAD
from megarl.mcore.model import PackedGPT, padded_vocab_size

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
    """Megatron's name with the global layer number, for example decoder.layers.3.mlp.linear_fc1.weight"""
    hf_names: tuple[str, ...]
    split: str
    """How tensor parallelism splits it: none, rows, columns, vocab (padded rows), qkv or gate_up"""


def describe(name: str, with_value_head: bool) -> Entry:
    """The entry of a parameter by its Megatron name (global layer number). Raises KeyError for an unknown
    one.
    """
    if with_value_head and name == "output_layer.weight":
        return Entry(name, (VALUE_HEAD,), "none")
    if name in _OTHER_NAMES:
        return Entry(name, (_OTHER_NAMES[name],), "none" if "norm" in name else "vocab")
    _, _, number, suffix = name.split(".", 3)
    hf_names = tuple(f"model.layers.{number}.{hf}" for hf in _LAYER_NAMES[suffix])
    if "linear_qkv." in suffix and "layer_norm" not in suffix:
        return Entry(name, hf_names, "qkv")
    splits = {"linear_fc1.weight": "gate_up", "linear_proj.weight": "columns", "linear_fc2.weight": "columns"}
    return Entry(name, hf_names, splits.get(suffix.split(".", 1)[1] if "." in suffix else suffix, "none"))


def named_entries(model: PackedGPT) -> list[tuple[Entry, torch.nn.Parameter]]:
    """The parameters on this rank, in the model's order, each once."""
    layers = [layer.layer_number - 1 for layer in model.decoder.layers]
    result = []
    for name, param in model.named_parameters():
        if name.startswith("decoder.layers."):
            prefix, middle, number, suffix = name.split(".", 3)
            name = f"{prefix}.{middle}.{layers[int(number)]}.{suffix}"
        result.append((describe(name, model.with_value_head), param))
    return result


def to_megatron(entry: Entry, tensors: list[Tensor], arch: Architecture, tp: int, tp_rank: int) -> Tensor:
    """Whole Hugging Face tensors -> this tensor-parallel rank's shard."""
    if entry.split == "qkv":
        heads = arch.num_kv_heads
        grouped = [x.reshape(heads, -1, *x.shape[1:]) for x in tensors]
        joined = torch.cat([x.chunk(tp)[tp_rank] for x in grouped], dim=1)
        return joined.reshape(-1, *tensors[0].shape[1:])
    if entry.split == "gate_up":
        return torch.cat([x.chunk(tp)[tp_rank] for x in tensors])
    (whole,) = tensors
    if entry.split == "columns":
        return whole.chunk(tp, dim=1)[tp_rank]
    if entry.split == "vocab":
        size = padded_vocab_size(arch.vocab_size, tp) // tp
        shard = whole[tp_rank * size : (tp_rank + 1) * size]
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
        parts = [torch.cat(shards)[: arch.vocab_size]]
    else:
        parts = [shards[0]]
    return [(name, part.contiguous()) for name, part in zip(entry.hf_names, parts, strict=True)]


def load_hf(model: PackedGPT, directory: Path, arch: Architecture) -> None:
    """Fill the model from a Hugging Face checkpoint; every rank reads its own part.

    A critic takes the checkpoint's value head (`score.weight`) where there is one and keeps its new one
    elsewhere. Raises KeyError that names a missing tensor, ValueError for one of another shape.
    """
    tp, tp_rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    with CheckpointReader(directory) as reader, torch.no_grad():
        for entry, param in named_entries(model):
            names = entry.hf_names
            if names == (VALUE_HEAD,) and VALUE_HEAD not in reader:
                continue
            if names == ("lm_head.weight",) and arch.tied:
                names = ("model.embed_tokens.weight",)
            shard = to_megatron(entry, [reader.read(name) for name in names], arch, tp, tp_rank)
            if shard.shape != param.shape:
                raise ValueError(
                    f"{directory}: {', '.join(names)} gives {entry.name} the shape {tuple(shard.shape)}, "
                    f"config.json asks for {tuple(param.shape)}"
                )
            param.copy_(shard)


def export_hf(model: PackedGPT, arch: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor (on the CPU) on global rank 0; every rank must run it to its end.

    Data-parallel replicas other than the first have nothing to do and yield nothing.
    """
    if parallel_state.get_data_parallel_rank() != 0:
        return
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    mine = [(entry, param) for entry, param in named_entries(model) if not _is_shared_copy(model, entry)]
    stages: list[list[tuple[Entry, torch.Size, torch.dtype]]] = [[] for _ in range(pp_group.size())]
    dist.all_gather_object(stages, [(e, p.shape, p.dtype) for e, p in mine], group=pp_group)
    for stage, entries in enumerate(stages):
        for position, (entry, shape, dtype) in enumerate(entries):
            if stage == pp_group.rank():
                tensor = mine[position][1].detach().contiguous()
            else:
                tensor = torch.empty(shape, dtype=dtype, device=mine[0][1].device)
            if pp_group.size() > 1:
                dist.broadcast(tensor, group=pp_group, group_src=stage)
            shards = _gather_tp(tensor, entry)
            if dist.get_rank() == 0:
                yield from ((name, whole.cpu()) for name, whole in to_hf(entry, shards, arch))


def _is_shared_copy(model: PackedGPT, entry: Entry) -> bool:
    """The last stage's copy of tied embeddings."""
    return entry.name == "output_layer.weight" and model.share_embeddings_and_output_weights


def _gather_tp(tensor: Tensor, entry: Entry) -> list[Tensor]:
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1 or entry.split == "none":
        return [tensor]
    shards = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(shards, tensor, group=group)
    return shards
