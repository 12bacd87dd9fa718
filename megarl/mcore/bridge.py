"""Weights between Hugging Face names and a Megatron model's shards.

Megatron keeps query, key and value of a key-value head together (linear_qkv: for each group its query heads,
its key head, its value head) and gate and up projections stacked (linear_fc1); both are split over
tensor-parallel ranks. Experts lie over expert-parallel ranks, each split over the expert-tensor-parallel ones.
"""

import re
from collections.abc import Callable, Iterator, Sequence
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
    "mlp.router.weight": ("mlp.gate.weight",),
}
_EXPERT_NAMES: dict[str, tuple[str, ...]] = {
    "linear_fc1.weight": ("gate_proj.weight", "up_proj.weight"),
    "linear_fc2.weight": ("down_proj.weight",),
}
# Of an expert's weight on its rank: the local layers' name and that of Transformer Engine's grouped layers.
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc\d)\.weight|(linear_fc\d)\.weight(\d+))")
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


def named_entries(chunks: Sequence[PackedGPT]) -> list[tuple[Entry, torch.nn.Parameter]]:
    """The parameters of this rank's pieces of the model, in their order, each once."""
    return [named for chunk in chunks for named in _name_chunk(chunk)]


def _name_chunk(model: PackedGPT) -> list[tuple[Entry, torch.nn.Parameter]]:
    layers = [layer.layer_number - 1 for layer in model.decoder.layers]
    result = []
    for name, param in model.named_parameters():
        if name.startswith("decoder.layers."):
            prefix, middle, number, suffix = name.split(".", 3)
            name = f"{prefix}.{middle}.{layers[int(number)]}.{_number_expert(suffix, model)}"
        result.append((describe(name, model.with_value_head), param))
    return result


def _number_expert(suffix: str, model: PackedGPT) -> str:
    """The name within its layer; an expert's weight with the expert's global number."""
    match = _LOCAL_EXPERT.fullmatch(suffix)
    if match is None:
        return suffix
    number, weight = (match[1], match[2]) if match[1] is not None else (match[4], match[3])
    first = parallel_state.get_expert_model_parallel_rank() * _num_local_experts(model)
    return f"mlp.experts.{first + int(number)}.{weight}.weight"


def _num_local_experts(model: PackedGPT) -> int:
    count: int = model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    return count


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


def load_hf(chunks: Sequence[PackedGPT], directory: Path, arch: Architecture) -> None:
    """Fill the model from a Hugging Face checkpoint; every rank reads its own part.

    A critic takes the checkpoint's value head (`score.weight`) where there is one and keeps its new one
    elsewhere. Raises KeyError that names a missing tensor, ValueError for one of another shape.
    """
    with CheckpointReader(directory) as reader, torch.no_grad():
        for entry, param in named_entries(chunks):
            names = entry.hf_names
            if names == (VALUE_HEAD,) and VALUE_HEAD not in reader:
                continue
            if names == ("lm_head.weight",) and arch.tied:
                names = ("model.embed_tokens.weight",)
            group = _shard_group(entry)
            shard = to_megatron(entry, [reader.read(name) for name in names], arch, group.size(), group.rank())
            if shard.shape != param.shape:
                raise ValueError(
                    f"{directory}: {', '.join(names)} gives {entry.name} the shape {tuple(shard.shape)}, "
                    f"config.json asks for {tuple(param.shape)}"
                )
            param.copy_(shard)


def _shard_group(entry: Entry) -> dist.ProcessGroup:
    """The ranks that hold the shards of one parameter."""
    if entry.expert is not None:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def export_hf(
    chunks: Sequence[PackedGPT], arch: Architecture, take: Callable[[torch.nn.Parameter], Tensor] = Tensor.detach
) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor (on the CPU) on global rank 0; every rank must run it to its end.

    take: what is exported of each parameter, in the parameter's shape; by default its weights.

    Whole on rank 0 at a time: one parameter, or the same one of each expert-parallel rank's next expert.
    Replicas other than the first of a parameter have nothing to do with it.
    """
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    mine = [(entry, take(param)) for entry, param in named_entries(chunks) if not _is_shared_copy(chunks[0], entry)]
    stages: list[list[tuple[Entry, torch.Size, torch.dtype]]] = [[] for _ in range(pp_group.size())]
    dist.all_gather_object(stages, [(e, p.shape, p.dtype) for e, p in mine], group=pp_group)
    for stage, entries in enumerate(stages):
        for position, (entry, shape, dtype) in enumerate(entries):
            if _replica(entry) != 0:
                continue
            if stage == pp_group.rank():
                tensor = mine[position][1].contiguous()
            else:
                tensor = torch.empty(shape, dtype=dtype, device=mine[0][1].device)
            if pp_group.size() > 1:
                dist.broadcast(tensor, group=pp_group, group_src=stage)
            for described, shards in _gather(tensor, entry, chunks[0]):
                if dist.get_rank() == 0:
                    yield from ((name, whole.cpu()) for name, whole in to_hf(described, shards, arch))


def _is_shared_copy(model: PackedGPT, entry: Entry) -> bool:
    """The last stage's copy of tied embeddings."""
    return entry.name == "output_layer.weight" and model.share_embeddings_and_output_weights


def _replica(entry: Entry) -> int:
    """Which of its copies this rank holds a part of."""
    if entry.expert is not None:
        replica: int = parallel_state.get_expert_data_parallel_rank()
    else:
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return replica


def _gather(tensor: Tensor, entry: Entry, model: PackedGPT) -> list[tuple[Entry, list[Tensor]]]:
    """The shards of the parameter and, of an expert's one, those of its counterparts on expert-parallel ranks."""
    if entry.expert is None:
        return [(entry, _gather_shards(tensor, parallel_state.get_tensor_model_parallel_group(), entry))]
    # Expert-tensor-parallel ranks are the faster in the numbering of this group.
    shards = _gather_shards(tensor, parallel_state.get_expert_tensor_and_model_parallel_group(), entry)
    size, count = parallel_state.get_expert_tensor_parallel_world_size(), _num_local_experts(model)
    own = f".experts.{entry.expert}."
    return [
        (
            describe(entry.name.replace(own, f".experts.{rank * count + entry.expert % count}."), False),
            shards[rank * size : (rank + 1) * size],
        )
        for rank in range(len(shards) // size)
    ]


def _gather_shards(tensor: Tensor, group: dist.ProcessGroup, entry: Entry) -> list[Tensor]:
    if group.size() == 1 or entry.split == "none":
        return [tensor]
    shards = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(shards, tensor, group=group)
    return shards
