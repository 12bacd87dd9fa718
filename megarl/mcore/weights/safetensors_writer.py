"""Safetensors files of a model whose tensors come one after the other.

safetensors' own writer copies all tensors of a file. Format: 8 bytes of the header's length, little-endian; the
header, JSON; the tensors' bytes one after the other.
"""

import ctypes
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megarl.json_text import naming_file
from megarl.mcore.weights.hf_reader import INDEX, SINGLE

MAX_FILE_BYTES = 4 << 30
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_safetensors(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """One file, or numbered files with an index where there is more than max_file_bytes; the tensors of a file are held
    until it is full.
    """
    parts: list[list[TensorSpec]] = []
    for held in _hold(tensors, max_file_bytes):
        parts.append([TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in held])
        _write_file(directory / f"part-{len(parts)}", parts[-1], held)
    for number, name in enumerate(_name_files(directory, parts), start=1):
        (directory / f"part-{number}").rename(directory / name)


def _write_file(path: Path, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> None:
    with naming_file(path), path.open("wb") as file:
        header = _encode_header(specs)
        file.write(len(header).to_bytes(8, "little") + header)
        for _, tensor in tensors:
            whole = tensor.contiguous()
            # Not as a numpy array: torch resizes no storage that one has shared, and offloading does that to weights.
            file.write((ctypes.c_char * whole.nbytes).from_address(whole.data_ptr()))
        file.flush()
        os.fsync(file.fileno())


def _name_files(directory: Path, parts: Sequence[Sequence[TensorSpec]]) -> list[str]:
    """The names of the files of `parts`; where they are several, the index is written."""
    if len(parts) == 1:
        return [SINGLE]
    names = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    weight_map = {spec.name: file for file, part in zip(names, parts, strict=True) for spec in part}
    index = {
        "metadata": {"total_size": sum(spec.num_bytes for part in parts for spec in part)},
        "weight_map": weight_map,
    }
    (directory / INDEX).write_text(json.dumps(index, indent=2))
    return names


def _hold(tensors: Iterable[tuple[str, Tensor]], max_file_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors of one file after another; at least of one, which may have none."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if held and size + tensor.nbytes > max_file_bytes:
            yield held
            held.clear()  # also for the caller, who has the list until the next one comes
            size = 0
        held.append((name, tensor))
        size += tensor.nbytes
    yield held


def _encode_header(specs: Sequence[TensorSpec]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        start, end = end, end + spec.num_bytes
        header[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    return encoded + b" " * (-len(encoded) % 8)
