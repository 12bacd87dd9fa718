"""Resolves the `model` group to an ordinary Hugging Face checkpoint directory on this machine."""

import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.schema.model import ModelConfig, ModelSource
from megarl.families.architecture import Architecture
from megarl.families.registry import parse_architecture
from megarl.hf.cache import default_cache_dir
from megarl.hf.random_model import build_random_checkpoint
from megarl.hf.smollm2 import build_smollm2_checkpoint

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
NEEDED_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""What of a model of the hub is downloaded: weights, configuration, tokenizer"""
POINTER, LONGEST_POINTER = b"version https://git-lfs", 1024
"""What Git leaves in the place of a large file that it has not fetched: a text of three lines"""
LONGEST_REASON = 300
"""Characters of another package's error that are shown"""

__all__ = [
    "check_config",
    "default_cache_dir",
    "find_checkpoint",
    "load_hf_config",
    "load_tokenizer",
    "resolve_checkpoint",
]


def resolve_checkpoint(model: ModelConfig, cache_dir: Path) -> Path:
    """A directory with config.json, safetensors weights and a tokenizer.

    A name of the hub that is not in the cache is downloaded, unless HF_HUB_OFFLINE is set.

    model.source random and smollm2 are made under `cache_dir` on first use and reused after it. Raises
    ConfigError, naming the key, what was looked for and where.
    """
    if model.source is ModelSource.random:
        return build_random_checkpoint(model.random, cache_dir)
    if model.source is ModelSource.smollm2:
        return build_smollm2_checkpoint(cache_dir)
    return find_checkpoint(model.path, "model.path")


def load_tokenizer(directory: Path) -> Any:
    """The transformers tokenizer of a checkpoint directory; no code of the checkpoint runs.

    Raises ConfigError naming the directory where it holds no tokenizer, and config.json where that cannot be read.
    """
    from transformers import AutoTokenizer

    if (directory / "config.json").is_file():
        load_hf_config(directory)
    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except BaseException as error:
        # Whatever is wrong with such files has another class: tokenizers raises Exception itself, and where its Rust
        # code panics a BaseException.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError([f"{directory}: no tokenizer could be read from it: {_in_a_line(error)}"]) from error


def load_hf_config(directory: Path) -> Any:
    """config.json as transformers reads it, and with it the server.

    Raises ConfigError that names it, or generation_config.json, and why it cannot be read.
    """
    from transformers import AutoConfig, GenerationConfig

    name = "config.json"
    try:
        if (directory / "generation_config.json").is_file():
            name = "generation_config.json"
            GenerationConfig.from_pretrained(str(directory), local_files_only=True)
            name = "config.json"
        return AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Classes of transformers, huggingface_hub and torch; TypeError and AttributeError too
        raise ConfigError(
            [f"{directory / name}: transformers, with which servers read it, refuses it: {_in_a_line(error)}"]
        ) from error


def check_config(directory: Path, architecture: Architecture) -> Iterator[str]:
    """What transformers, and with it the server, reads in config.json otherwise than `architecture` has it, such as the
    value of a missing key; a message each. Raises ConfigError where transformers refuses the file.
    """
    path = directory / "config.json"
    content = load_hf_config(directory).to_dict()
    try:
        own, other = asdict(architecture), asdict(parse_architecture(content, path))
    except ValueError as error:
        yield f"{error} (the file as transformers reads it, and with it the server; a key may be missing in it)"
        return
    for name, value in own.items():
        # The longest sequence of a server is the least of several keys, of which transformers drops some.
        if value != other[name] and name != "max_length":
            yield (
                f"{path}: gives {name} {value} here and {other[name]} in transformers, with which servers read it;"
                " write the key that decides it into the file"
            )


def find_checkpoint(path: str | None, key: str, may_download: bool = True) -> Path:
    """The checkpoint directory that the configuration key `key` names: a path, or a name on the Hugging Face hub.

    may_download: whether a name that is not in the cache is downloaded, where HF_HUB_OFFLINE does not forbid it. Raises
    ConfigError naming the key, what was looked for and where.
    """
    if not path:
        raise ConfigError(
            [
                f"{key}: {path!r} found; it must be a checkpoint directory,"
                " or the name of a model on the Hugging Face hub"
            ]
        )
    try:
        directory = Path(path).expanduser()
        if not directory.is_dir():
            directory = _find_on_hub(path, directory, key, may_download)
        _check_files(path, directory, key)
        return directory.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: ~NAME of no user, links in a circle
        raise ConfigError([f"{key}: {path!r} found, which cannot be read: {_in_a_line(error)}"]) from error


def _find_on_hub(name: str, directory: Path, key: str, may_download: bool) -> Path:
    """The model's directory in the Hugging Face cache; it is downloaded where it is not there and the machine may."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True, allow_patterns=list(NEEDED_FILES)))
    except (LocalEntryNotFoundError, HFValidationError, OSError) as error:
        nowhere = (
            f"{key}: {name!r} found, but there is no directory {directory.absolute()} and no model of that name in the"
            f" Hugging Face cache {HF_HUB_CACHE}"
        )
        if isinstance(error, HFValidationError) or not HUB_NAME.fullmatch(name):
            raise ConfigError([f"{nowhere}; a name of the hub is OWNER/NAME"]) from error
    if HF_HUB_OFFLINE or not may_download:
        why = "HF_HUB_OFFLINE forbids to download it" if HF_HUB_OFFLINE else "a run would download it"
        raise ConfigError([f"{nowhere}, and {why}; {_how_to_fetch(name)}"])
    print(f"{key}: {name} is not in the Hugging Face cache {HF_HUB_CACHE}; downloading it", flush=True)
    try:
        return Path(snapshot_download(name, allow_patterns=list(NEEDED_FILES)))
    except Exception as error:  # No network, no such model, no right to it, no space: each has a class of its own.
        raise ConfigError(
            [f"{nowhere}, and it could not be downloaded ({_in_a_line(error)}); {_how_to_fetch(name)}"]
        ) from error


def _how_to_fetch(name: str) -> str:
    return (
        f"where there is a network, `hf download {name}` does it (HF_TOKEN for a model that asks for consent);"
        " HF_HOME or HF_HUB_CACHE name the cache to be carried over"
    )


def _check_files(path: str, directory: Path, key: str) -> None:
    os.listdir(directory)  # raises where that is not allowed, which globs hide
    missing = [name for name in ("config.json",) if not (directory / name).is_file()]
    if not any(file.is_file() for file in directory.glob("*.safetensors")):
        missing.append("*.safetensors")
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        missing.append("tokenizer.json")
    if missing:
        raise ConfigError(
            [
                f"{key}: {path!r} found; {directory} lacks {', '.join(missing)},"
                " which a Hugging Face checkpoint directory has"
            ]
        )
    for pattern in NEEDED_FILES:
        for file in sorted(directory.glob(pattern)):
            if file.is_file() and file.stat().st_size < LONGEST_POINTER and file.read_bytes().startswith(POINTER):
                raise ConfigError(
                    [
                        f"{key}: {file} is a Git LFS pointer and not the file itself; `git lfs pull` in its directory"
                        " brings the files"
                    ]
                )


def _in_a_line(error: BaseException) -> str:
    """The reason, without the lines that point at the documentation."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} ..."
