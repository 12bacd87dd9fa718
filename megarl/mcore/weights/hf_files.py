"""Writing a Hugging Face checkpoint directory that appears whole or not at all."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megarl.json_text import load_json_object
from megarl.mcore.weights.adapters import PeftAdapter
from megarl.mcore.weights.hf_critic import VALUE_HEAD, to_classifier_config
from megarl.mcore.weights.hf_reader import INDEX, CheckpointReader
from megarl.mcore.weights.safetensors_writer import DTYPE_NAMES, MAX_FILE_BYTES, write_safetensors

# Everything of the source that is not weights goes along: config, tokenizer, chat template, generation settings.
_COPIED = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")


def write_hf_checkpoint(
    directory: Path,
    source: Path,
    tensors: Iterable[tuple[str, Tensor]],
    critic_fields: Mapping[str, Any] = MappingProxyType({}),
    adapter: PeftAdapter | None = None,
) -> None:
    """Write tensors with the source's config and tokenizer; `directory` appears complete or not at all.

    With a value head among the tensors it is a ...ForSequenceClassification. An existing directory is replaced.
    critic_fields: further keys of a critic's config.json (`WorkerSpec.critic_fields`). adapter: written beside the
    weights that it is merged into.
    """
    with replace_directory(directory) as building:
        write_safetensors(building, tensors, MAX_FILE_BYTES)
        with CheckpointReader(building) as reader:
            value_head = reader.read(VALUE_HEAD).dtype if VALUE_HEAD in reader else None
            stored = reader.read_dtype(min(reader.names))
        dtype = next(dtype for dtype, name in DTYPE_NAMES.items() if name == stored)
        copy_description(source, building, value_head, critic_fields, dtype)
        if adapter is not None:
            adapter.write(building)


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


def copy_description(
    source: Path,
    target: Path,
    value_head: torch.dtype | None,
    critic_fields: Mapping[str, Any] = MappingProxyType({}),
    dtype: torch.dtype | None = None,
) -> None:
    """Copy everything of a Hugging Face checkpoint directory that is not weights.

    value_head: dtype of the value head of a critic, of which config.json then says ...ForSequenceClassification.
    critic_fields: further keys of a critic's config.json (`WorkerSpec.critic_fields`). dtype: of the weights, by which
    transformers loads them where config.json names it; None: it stays as in the source.
    """
    target.mkdir(parents=True, exist_ok=True)
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.name != INDEX:
                shutil.copyfile(file, target / file.name)
    if value_head is not None:
        path = target / "config.json"
        fields = to_classifier_config(load_json_object(path), value_head, critic_fields)
        path.write_text(json.dumps(fields, indent=2) + "\n")
    if dtype is not None:
        _set_dtype(target, dtype)


def _set_dtype(directory: Path, dtype: torch.dtype) -> None:
    path, name = directory / "config.json", str(dtype).removeprefix("torch.")
    config = load_json_object(path)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if config.get(key) != name:
        path.write_text(json.dumps({**config, key: name}, indent=2) + "\n")


def _publish(building: Path, directory: Path) -> None:
    """Rename into place; an older directory is moved aside first: a rename cannot replace a full one."""
    if directory.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{directory.name}-old-", dir=directory.parent))
        os.rename(directory, old / directory.name)
        os.rename(building, directory)
        shutil.rmtree(old)
    else:
        os.rename(building, directory)
