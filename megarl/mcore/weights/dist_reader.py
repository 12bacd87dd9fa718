"""Tensors out of the files of Megatron's dist_checkpointing, one at a time, in one process and without Megatron.

.metadata is a pickle: only the classes that torch's and Megatron's writers put there are made of it, and none else.
"""

import os
import pickle
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from megarl.checkpoint.manifest import CheckpointError, name_some
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


class DistReader:
    """The weights of a directory; the state of its optimizer is passed over."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError where the metadata cannot be read."""
        self._directory = directory
        metadata = load_metadata(directory)
        self._tensors: dict[str, TensorStorageMetadata] = {
            key: value
            for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata) and not belongs_to_optimizer(key)
        }
        self._storage = metadata.storage_data

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Key -> shape of the whole tensor, stacked axes first."""
        return {key: tuple(tensor.size) for key, tensor in self._tensors.items()}

    def find_dtype(self, key: str) -> torch.dtype:
        return self._tensors[key].properties.dtype

    def find_problems(self) -> list[str]:
        """What the files do not hold, by the metadata and the files' sizes; each with up to five of its tensors."""
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(self._directory) if entry.is_file()}
        problems: dict[str, list[str]] = {}
        for key, tensor in self._tensors.items():
            found = {self._find_problem(key, tensor, chunk, sizes) for chunk in tensor.chunks}
            if sum(torch.Size(chunk.sizes).numel() for chunk in tensor.chunks) != tensor.size.numel():
                found.add(f"pieces in {METADATA} that do not make up the tensor")
            for problem in found - {None}:
                problems.setdefault(str(problem), []).append(key)
        return [f"{problem}: {name_some(keys)}" for problem, keys in problems.items()]

    def _find_problem(
        self, key: str, tensor: TensorStorageMetadata, chunk: ChunkStorageMetadata, sizes: dict[str, int]
    ) -> str | None:
        info = self._storage.get(MetadataIndex(key, chunk.offsets))
        spans = zip(chunk.offsets, chunk.sizes, tensor.size, strict=False)
        if len(chunk.sizes) != len(tensor.size) or any(offset + part > size for offset, part, size in spans):
            return f"pieces in {METADATA} outside their tensor"
        if info is None:
            return f"pieces in {METADATA} without a file"
        if info.relative_path not in sizes:
            return f"{info.relative_path} is missing"
        return f"{info.relative_path} is truncated" if info.offset + info.length > sizes[info.relative_path] else None

    def read(self, key: str, index: tuple[int, ...]) -> Tensor:
        """The part of a tensor at `index` of its leading axes, put together from its pieces.

        Raises CheckpointError that names tensor and file where a piece cannot be read or is not what the metadata says.
        """
        tensor = self._tensors[key]
        depth, shape = len(index), tuple(tensor.size[len(index) :])
        chunks = [chunk for chunk in tensor.chunks if _covers(chunk, index)]
        if len(chunks) == 1 and tuple(chunks[0].sizes[depth:]) == shape:
            return self._read_part(key, chunks[0], index)
        whole = torch.empty(shape, dtype=tensor.properties.dtype)
        num_elements = 0
        for chunk in chunks:
            part = self._read_part(key, chunk, index)
            place = tuple(
                slice(offset, offset + size)
                for offset, size in zip(chunk.offsets[depth:], chunk.sizes[depth:], strict=True)
            )
            whole[place] = part
            num_elements += part.numel()
        if num_elements != whole.numel():
            raise CheckpointError(
                f"{self._directory / METADATA}: the pieces of {key} at {list(index)} do not make it up"
            )
        return whole

    def _read_part(self, key: str, chunk: ChunkStorageMetadata, index: tuple[int, ...]) -> Tensor:
        info = self._storage[MetadataIndex(key, chunk.offsets)]
        path = self._directory / Path(info.relative_path).name
        what = f"{path}: {key} from {list(chunk.offsets)}"
        try:
            with path.open("rb") as file:
                view = _create_file_view(file, info.offset, info.length)
                part = torch.load(cast(IO[bytes], view), map_location="cpu", weights_only=True)
        except Exception as error:  # What a damaged file raises is anything.
            first = str(error).strip().splitlines()[:1]
            raise CheckpointError(f"{what} cannot be read: {type(error).__name__}: {''.join(first)}") from None
        expected = self._tensors[key].properties.dtype
        if not isinstance(part, Tensor) or part.shape != torch.Size(chunk.sizes) or part.dtype != expected:
            found = f"{list(part.shape)} {part.dtype}" if isinstance(part, Tensor) else type(part).__name__
            raise CheckpointError(f"{what} is {found}; {METADATA} says {list(chunk.sizes)} {expected}")
        return part[tuple(at - offset for at, offset in zip(index, chunk.offsets, strict=False))]


def _covers(chunk: ChunkStorageMetadata, index: tuple[int, ...]) -> bool:
    return all(
        offset <= at < offset + size for at, offset, size in zip(index, chunk.offsets, chunk.sizes, strict=False)
    )
