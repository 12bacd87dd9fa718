"""What a directory of Megatron's dist_checkpointing holds, by its metadata.

.metadata is a pickle: only the classes that torch's and Megatron's writers put there are made of it, and none else.
"""

import pickle
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megarl.checkpoint.manifest import CheckpointError
from megarl.mcore.weights.dist_format import METADATA, belongs_to_optimizer

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
