"""Where a parameter lies in a checkpoint of Megatron's dist_checkpointing, whose keys know no layout.

Layers that are alike are stacked: decoder.layers.mlp.experts.experts.linear_fc1.weight is [layers, experts, rows,
columns]. Where some layers have experts and others do not, each has keys of its own, decoder.layers.3.mlp...
"""

import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megarl.config.schema.roles import Dtype, ParallelConfig
from megarl.files import CheckpointError
from megarl.mcore.entries import Entry, compute_megatron_shape
from megarl.mcore.spec import Role
from megarl.models.architecture import Architecture

KIND = "megatron"
DESCRIPTION = "hf"
"""Directory in it with everything of the Hugging Face checkpoint that is not weights"""
METADATA = ".metadata"
BACKENDS = "metadata.json"
CONTENT = {"distrib_optim_sharding_type": "fully_reshardable"}
"""The only format whose optimizer state can change its tensor- and pipeline-parallel layout."""
GATHERED_ELEMENTS = 1 << 26
"""How many elements of the optimizer's state a save gathers on the device at once, over all data-parallel ranks"""
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")


def describe_role(role: Role, dtype: Dtype, parallel: ParallelConfig, iteration: int | None) -> dict[str, Any]:
    """What the manifest of a role's directory says about it."""
    layout = {name: getattr(parallel, name) for name in ("tp", "pp", "dp", "cp", "ep")}
    return {"kind": KIND, "role": role.value, "dtype": dtype.value, "parallel": layout, "iteration": iteration}


def belongs_to_optimizer(key: str) -> bool:
    return _OPTIMIZER.match(key) is not None


def locate(entry: Entry, arch: Architecture) -> tuple[str, tuple[int, ...]]:
    """Key and place along the stacked axes: (), (layer,), (layer, expert), or (expert,) where layers differ."""
    if not entry.name.startswith("decoder.layers."):
        return entry.name, ()
    _, _, layer, suffix = entry.name.split(".", 3)
    index: tuple[int, ...] = () if entry.expert is None else (entry.expert,)
    if entry.expert is not None:
        suffix = f"mlp.experts.experts.{suffix.removeprefix(f'mlp.experts.{entry.expert}.')}"
    if arch.has_unlike_layers:
        return f"decoder.layers.{layer}.{suffix}", index
    return f"decoder.layers.{suffix}", (int(layer), *index)


def compute_global_shapes(entries: Sequence[Entry], arch: Architecture, tp: int) -> Mapping[str, tuple[int, ...]]:
    """Key -> whole shape with the stacked axes."""
    layers = () if arch.has_unlike_layers else (arch.num_layers,)
    stacked = (*layers, arch.experts.num_experts if arch.experts else 0)
    located = ((entry, *locate(entry, arch)) for entry in entries)
    return {key: (*stacked[: len(index)], *compute_megatron_shape(entry, arch, tp)) for entry, key, index in located}


_CHECKPOINT = "torch.distributed.checkpoint"
_ALLOWED = {
    f"{_CHECKPOINT}.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    },
    f"{_CHECKPOINT}.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},
    f"{_CHECKPOINT}.filesystem": {"_StorageInfo"},
    # It looks a name up among the memory layouts.
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
}


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(
            f"{self._path}: refers to {module}.{name}, which does not belong in a checkpoint's metadata; nothing of it"
            " was run"
        )


def load_metadata(directory: Path) -> Any:
    """torch's Metadata. Raises CheckpointError where there is none, or something else in its place."""
    path = directory / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file, path).load()
        tensors, storage = dict(metadata.state_dict_metadata), dict(metadata.storage_data)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing; {directory} holds no checkpoint of Megatron's") from None
    except CheckpointError:
        raise
    except Exception as error:  # What a damaged pickle raises is anything.
        raise CheckpointError(f"{path}: cannot be read: {error!r}") from None
    if not all(isinstance(key, str) for key in tensors) or not all(isinstance(x, MetadataIndex) for x in storage):
        raise CheckpointError(f"{path}: is not a checkpoint's metadata")
    return metadata


def holds_optimizer(directory: Path) -> bool:
    """Whether there is an optimizer's state beside the weights. Raises CheckpointError as `load_metadata`."""
    return any(belongs_to_optimizer(key) for key in load_metadata(directory).state_dict_metadata)


def list_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Key -> shape of the whole tensor, stacked axes first; not of the optimizer's state. Raises as `load_metadata`."""
    return {
        key: tuple(value.size)
        for key, value in load_metadata(directory).state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata) and not belongs_to_optimizer(key)
    }
