"""Hugging Face checkpoint directories: reading their safetensors, writing one that appears whole or not at
all.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_FILE_BYTES = 4 << 30
# Everything of the source that is not weights goes along: config, tokenizer, chat template, generation
# settings.
_COPIED = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")


class CheckpointReader:
    """The tensors of DIRECTORY/model.safetensors, or of the files that its index names.

    Raises FileNotFoundError where there is neither, KeyError that names a tensor that is not there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        if (directory / INDEX).is_file():
            self._files: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
        elif (directory / SINGLE).is_file():
            with safe_open(directory / SINGLE, framework="pt") as handle:
                self._files = dict.fromkeys(handle.keys(), SINGLE)
        else:
            raise FileNotFoundError(f"{directory}: found neither {SINGLE} nor {INDEX}")
        self._open: dict[str, safe_open] = {}

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str) -> Tensor:
        if name not in self._files:
            raise KeyError(f"{self._directory}: has no tensor {name}")
        file = self._files[name]
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(self._directory / file, framework="pt"))
        return self._open[file].get_tensor(name)


def write_hf_checkpoint(directory: Path, source: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors with the source's config and tokenizer; `directory` appears complete or not at all.

    An existing directory is replaced.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _write_tensors(building, tensors)
        for pattern in _COPIED:
            for file in source.glob(pattern):
                if file.name != INDEX:
                    shutil.copyfile(file, building / file.name)
        building.chmod(0o755)
        _publish(building, directory)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _write_tensors(directory: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """One file, or numbered files with an index where there is more than MAX_FILE_BYTES."""
    parts: list[tuple[Path, list[str]]] = []
    held: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        path = directory / f"part-{len(parts)}.safetensors"
        save_file(held, path, metadata={"format": "pt"})
        parts.append((path, list(held)))
        held.clear()

    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if held and size + num_bytes > MAX_FILE_BYTES:
            flush()
            size = 0
        held[name] = tensor
        size += num_bytes
        total += num_bytes
    flush()
    if len(parts) == 1:
        parts[0][0].rename(directory / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        path.rename(directory / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2))


def _publish(building: Path, directory: Path) -> None:
    """Rename into place; an older directory is moved aside first, since a rename cannot replace a full
    one.
    """
    if directory.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{directory.name}-old-", dir=directory.parent))
        os.rename(directory, old / directory.name)
        os.rename(building, directory)
        shutil.rmtree(old)
    else:
        os.rename(building, directory)
