"""Resolves the `model` group to an ordinary Hugging Face checkpoint directory on this machine."""

import re
from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.schema.model import ModelConfig, ModelSource
from megarl.hf.cache import default_cache_dir
from megarl.hf.random_model import build_random_checkpoint
from megarl.hf.smollm2 import build_smollm2_checkpoint

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
NEEDED_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""What of a model of the hub is downloaded: weights, configuration, tokenizer"""

__all__ = ["default_cache_dir", "find_checkpoint", "load_tokenizer", "resolve_checkpoint"]


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

    Raises ConfigError naming the directory where it holds no tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError([f"{directory}: no tokenizer could be read from it: {_first_line(error)}"]) from error


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
    directory = Path(path).expanduser()
    if not directory.is_dir():
        directory = _find_on_hub(path, directory, key, may_download)
    _check_files(path, directory, key)
    return directory.resolve()


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
            [f"{nowhere}, and it could not be downloaded ({_first_line(error)}); {_how_to_fetch(name)}"]
        ) from error


def _how_to_fetch(name: str) -> str:
    return (
        f"where there is a network, `hf download {name}` does it (HF_TOKEN for a model that asks for consent);"
        " HF_HOME or HF_HUB_CACHE name the cache to be carried over"
    )


def _check_files(path: str, directory: Path, key: str) -> None:
    missing = [name for name in ("config.json",) if not (directory / name).is_file()]
    if not any(directory.glob("*.safetensors")):
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


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
