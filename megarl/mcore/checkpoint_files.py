"""Writing a Hugging Face checkpoint directory that appears whole or not at all."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.mcore.checkpoint_reader import INDEX, SINGLE, CheckpointReader
from megarl.mcore.critic_checkpoint import VALUE_HEAD, to_classifier_config

MAX_FILE_BYTES = 4 << 30
# Everything of the source that is not weights goes along: config, tokenizer, chat template, generation
# settings.
_COPIED = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")


def write_hf_checkpoint(directory: Path, source: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors with the source's config and tokenizer; `directory` appears complete or not at all.

    With a value head among the tensors it is a ...ForSequenceClassification. An existing directory is replaced.
    """
    with replace_directory(directory) as building:
        _write_tensors(building, tensors)
        with CheckpointReader(building) as reader:
            dtype = reader.read(VALUE_HEAD).dtype if VALUE_HEAD in reader else None
        copy_description(source, building, dtype)


@contextmanager
def replace_directory(directory: Path) -> Iterator[Path]:
    """An empty directory beside `directory` to be filled; it takes its place at the end, or is gone after an error."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        yield building
        building.chmod(0o755)
        _publish(building, directory)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def copy_description(source: Path, target: Path, value_head: torch.dtype | None) -> None:
    """Copy everything of a Hugging Face checkpoint directory that is not weights.

    value_head: dtype of the value head of a critic, of which config.json then says ...ForSequenceClassification.
    """
    target.mkdir(parents=True, exist_ok=True)
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.name != INDEX:
                shutil.copyfile(file, target / file.name)
    if value_head is not None:
        path = target / "config.json"
        path.write_text(json.dumps(to_classifier_config(json.loads(path.read_text()), value_head), indent=2) + "\n")


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
