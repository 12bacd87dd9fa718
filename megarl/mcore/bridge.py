"""Weights between a Hugging Face checkpoint and the shards of a Megatron model on its ranks; `entries` says how."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megarl.config.errors import ConfigError
from megarl.mcore.entries import PREFIX, VALUE_HEAD, Entry, describe, to_hf, to_megatron
from megarl.mcore.hf import CheckpointReader, is_finite
from megarl.mcore.model import PackedGPT
from megarl.models.architecture import Architecture
from megarl.models.families import Split

# Of an expert's weight on its rank: the local layers' name and that of Transformer Engine's grouped layers.
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc\d)\.weight|(linear_fc\d)\.weight(\d+))")


def named_entries(chunks: Sequence[PackedGPT]) -> list[tuple[Entry, Tensor]]:
    """The parameters of this rank's pieces of the model and the constants beside them, in their order, each once."""
    result = []
    for chunk in chunks:
        layers, saved = [layer.layer_number - 1 for layer in chunk.decoder.layers], chunk.state_dict(keep_vars=True)
        tensors = [named for named in chunk.named_parameters() if not named[0].startswith(PREFIX)]
        # The buffers that are a part of the checkpoint.
        tensors += [named for named in chunk.named_buffers() if named[0] in saved]
        for name, param in tensors:
            if name.startswith("decoder.layers."):
                prefix, middle, number, suffix = name.split(".", 3)
                name = f"{prefix}.{middle}.{layers[int(number)]}.{_number_expert(suffix, chunk)}"
            result.append((describe(name, chunk.arch, chunk.with_value_head), param))
    return result


def list_own_entries(chunks: Sequence[PackedGPT]) -> list[tuple[Entry, Tensor]]:
    """`named_entries` without the last stage's copy of tied embeddings."""
    shares = chunks[0].share_embeddings_and_output_weights
    return [named for named in named_entries(chunks) if not (shares and named[0].name == "output_layer.weight")]


def compute_checksum(chunks: Sequence[PackedGPT]) -> str:
    """SHA-256 of this rank's weights, by name."""
    digest = hashlib.sha256()
    for entry, param in sorted(named_entries(chunks), key=lambda named: named[0].name):
        digest.update(entry.name.encode())
        digest.update(take_weights(param).cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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


def load_hf(chunks: Sequence[PackedGPT], directory: Path, arch: Architecture) -> None:
    """Fill the model from a Hugging Face checkpoint; every rank reads its own part. A critic keeps its new value head
    where there is none (`score.weight`).

    Raises KeyError that names a missing tensor, ConfigError for one of another shape or with NaN or infinity.
    """
    with CheckpointReader(directory) as reader, torch.no_grad():
        for entry, param in named_entries(chunks):
            names = entry.hf_names
            if names == (VALUE_HEAD,) and VALUE_HEAD not in reader:
                continue
            if names == ("lm_head.weight",) and arch.tied:
                names = ("model.embed_tokens.weight",)
            group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
            if entry.expert is not None:
                group = parallel_state.get_expert_tensor_parallel_group()
            tensors = [reader.read(name) for name in names]
            for name, tensor in zip(names, tensors, strict=True):
                if not is_finite(tensor):
                    raise ConfigError([f"{directory}: {name} has NaN or infinity; the checkpoint is damaged"])
            shard = to_megatron(entry, tensors, arch, group.size(), group.rank())
            if shard.shape != param.shape:
                found = f"{', '.join(names)} gives {entry.name} the shape {tuple(shard.shape)}"
                raise ConfigError([f"{directory}: {found}, config.json asks for {tuple(param.shape)}"])
            param.copy_(shard)


def export_hf(
    chunks: Sequence[PackedGPT],
    arch: Architecture,
    take: Callable[[Tensor], Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor (on the CPU) on global rank 0, which holds one parameter at a time, or one of all
    experts at one place; every rank must run it to its end. take: what is exported of each parameter, in
    the parameter's shape; by default its weights. dtype: of that; by default the parameter's.
    """
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    expert_replica = parallel_state.get_expert_data_parallel_rank()
    take, mine = take or take_weights, list_own_entries(chunks)
    stages: list[list[tuple[Entry, torch.Size, torch.dtype]]] = [[] for _ in range(pp_group.size())]
    dist.all_gather_object(stages, [(e, p.shape, dtype or p.dtype) for e, p in mine], group=pp_group)
    for stage, entries in enumerate(stages):
        for position, (entry, shape, sent) in enumerate(entries):
            if (replica if entry.expert is None else expert_replica) != 0:
                continue
            if stage == pp_group.rank():
                tensor = take(mine[position][1]).contiguous()
            else:
                tensor = torch.empty(shape, dtype=sent, device=mine[0][1].device)
            if pp_group.size() > 1:
                dist.broadcast(tensor, group=pp_group, group_src=stage)
            for described, shards in _gather(tensor, entry, chunks[0]):
                if dist.get_rank() == 0:
                    yield from ((name, whole.cpu()) for name, whole in to_hf(described, shards, arch))


def take_weights(param: Tensor) -> Tensor:
    """The weights of a parameter, merged with its adapter where it has one."""
    adapter = getattr(param, "adapter", None)
    return param.detach() if adapter is None else adapter.merge(param)


class Weights(Mapping[str, Tensor]):
    """This rank's weights by their entries' names; of those merged with an adapter one copy is kept at a time."""

    def __init__(self, named: Iterable[tuple[Entry, Tensor]]) -> None:
        self._params = {entry.name: param for entry, param in named}
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = (name, take_weights(self._params[name]))
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)


def take_gradient(tensor: Tensor) -> Tensor:
    """float32; zeros for a constant and a frozen parameter, with an adapter how the merged weight moves by it."""
    if (adapter := getattr(tensor, "adapter", None)) is not None:
        moves: Tensor = adapter.gradient()
        return moves
    return getattr(tensor, "main_grad") if tensor.requires_grad else torch.zeros_like(tensor, dtype=torch.float32)  # noqa: B009


def _gather(tensor: Tensor, entry: Entry, model: PackedGPT) -> list[tuple[Entry, list[Tensor]]]:
    """The shards of the parameter and, of an expert's one, those of its counterparts on expert-parallel ranks."""
    is_split = entry.split is not Split.none
    if entry.expert is None:
        return [(entry, gather_shards(tensor, parallel_state.get_tensor_model_parallel_group(), is_split))]
    # Expert-tensor-parallel ranks are the faster in the numbering of this group.
    shards = gather_shards(tensor, parallel_state.get_expert_tensor_and_model_parallel_group(), is_split)
    size, count = parallel_state.get_expert_tensor_parallel_world_size(), _num_local_experts(model)
    own, found = f".experts.{entry.expert}.", []
    for rank in range(len(shards) // size):
        name = entry.name.replace(own, f".experts.{rank * count + entry.expert % count}.")
        found.append((describe(name, model.arch, False), shards[rank * size : (rank + 1) * size]))
    return found


def gather_shards(tensor: Tensor, group: dist.ProcessGroup, is_split: bool) -> list[Tensor]:
    if group.size() == 1 or not is_split:
        return [tensor]
    shards = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(shards, tensor, group=group)
    return shards
