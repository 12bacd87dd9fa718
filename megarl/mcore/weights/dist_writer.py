"""Weights into files of Megatron's dist_checkpointing, one parameter at a time, in one process and without Megatron.

torch's own writer keeps the tensors of a file until its end.
"""

import json
import math
import os
import pickle
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megarl.config.schema.roles import ParallelConfig
from megarl.mcore.weights.dist_format import BACKENDS, COMMON, CONTENT, METADATA, compute_global_shapes, locate
from megarl.mcore.weights.entries import Entry, split_gate_up, to_megatron
from megarl.models.architecture import Architecture
from megarl.models.family import Split

_AXES = {Split.columns: 1}


def build_layout(tp: int, pp: int, ep: int, is_mixture: bool) -> ParallelConfig:
    """The smallest layout with these sizes. A mixture of experts under tp needs sequence parallelism."""
    return ParallelConfig(num_processes=math.lcm(tp, ep) * pp, tp=tp, sp=is_mixture and tp > 1, pp=pp, ep=ep)


class DistWriter:
    """Cuts parameters as the ranks of a layout hold them, each rank's pieces into a file of its own."""

    def __init__(self, directory: Path, entries: list[Entry], arch: Architecture, parallel: ParallelConfig) -> None:
        """directory: an existing one."""
        self._directory, self._arch, self._parallel = directory, arch, parallel
        self._shapes = compute_global_shapes(entries, arch, parallel.tp)
        self._stack = ExitStack()
        self._files: dict[str, IO[bytes]] = {}
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}

    def __enter__(self) -> "DistWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if kind is None:
                self._finish()

    def write(self, entry: Entry, tensors: list[Tensor]) -> None:
        """tensors: the whole Hugging Face tensors of the parameter, all of one dtype."""
        key, index = locate(entry, self._arch)
        if key not in self._tensors:
            properties = TensorProperties(tensors[0].dtype)
            self._tensors[key] = TensorStorageMetadata(properties, torch.Size(self._shapes[key]), [])
        for rank, offsets, piece in self._cut(entry, tensors):
            sizes = torch.Size((1,) * len(index) + tuple(piece.shape))
            where = torch.Size((*index, *offsets))
            # A view would be written with all that it is a view of.
            if piece.untyped_storage().nbytes() != piece.nbytes or not piece.is_contiguous():
                piece = piece.clone(memory_format=torch.contiguous_format)
            name = f"__{self._find_stage(entry) * self._stage_size + rank}_0.distcp"
            if name not in self._files:
                self._files[name] = self._stack.enter_context((self._directory / name).open("wb"))
            file = self._files[name]
            start = file.tell()
            torch.save(piece.view(sizes), file)
            self._storage[MetadataIndex(key, where)] = _StorageInfo(name, start, file.tell() - start)
            self._tensors[key].chunks.append(ChunkStorageMetadata(where, sizes))

    @property
    def _stage_size(self) -> int:
        return self._parallel.num_processes // self._parallel.pp

    def _cut(self, entry: Entry, tensors: list[Tensor]) -> Iterator[tuple[int, tuple[int, ...], Tensor]]:
        """Rank within the stage, offsets in the parameter, and each piece."""
        tp, first = self._parallel.tp, 0
        if entry.expert is not None and self._arch.experts is not None:
            tp, first = 1, entry.expert // (self._arch.experts.num_experts // self._parallel.ep)
        for rank in range(1 if entry.split is Split.none else tp):
            if entry.split is Split.gate_up:
                # Gate and up are apart in the whole parameter, whatever a rank's own shard looks like.
                for half, tensor in enumerate(split_gate_up(tensors)):
                    rows = len(tensor) // tp
                    yield first + rank, (half * len(tensor) + rank * rows, 0), tensor[rank * rows : (rank + 1) * rows]
                continue
            shard = to_megatron(entry, tensors, self._arch, tp, rank)
            offsets = [0] * shard.ndim
            axis = _AXES.get(entry.split, 0)
            offsets[axis] = rank * shard.shape[axis]
            yield first + rank, tuple(offsets), shard

    def _find_stage(self, entry: Entry) -> int:
        if entry.name.startswith("decoder.layers."):
            return int(entry.name.split(".")[2]) // (self._arch.num_layers // self._parallel.pp)
        return 0 if entry.name.startswith("embedding.") else self._parallel.pp - 1

    def _finish(self) -> None:
        """What makes it a checkpoint."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        metadata = Metadata(dict(self._tensors), storage_data=self._storage, version=CURRENT_DCP_VERSION)
        (self._directory / METADATA).write_bytes(pickle.dumps(metadata))
        torch.save({"content_metadata": dict(CONTENT)}, self._directory / COMMON)
        backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        backends |= {"common_backend": "torch", "common_backend_version": 1}
        (self._directory / BACKENDS).write_text(json.dumps(backends))
