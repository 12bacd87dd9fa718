"""Resolves the `model` group to an ordinary Hugging Face checkpoint directory on this machine."""

from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.schema.model import ModelConfig, ModelSource
from megarl.hf.cache import default_cache_dir
from megarl.hf.random_model import build_random_checkpoint
from megarl.hf.smollm2 import build_smollm2_checkpoint

__all__ = ["default_cache_dir", "find_checkpoint", "load_tokenizer", "resolve_checkpoint"]


def resolve_checkpoint(model: ModelConfig, cache_dir: Path) -> Path:
    """A directory with config.json, safetensors weights and a tokenizer; nothing is downloaded.

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


def find_checkpoint(path: str | None, key: str) -> Path:
    """The checkpoint directory that the configuration key `key` names: a path, or a name in the Hugging Face cache.

    Raises ConfigError naming the key, what was looked for and where.
    """
    if not path:
        raise ConfigError(
            [
                f"{key}: {path!r} found; it must be a checkpoint directory,"
                " or the name of a model in the local Hugging Face cache"
            ]
        )
    directory = Path(path).expanduser()
    if not directory.is_dir():
        directory = _find_in_hub_cache(path, directory, key)
    _check_files(path, directory, key)
    return directory.resolve()


def _find_in_hub_cache(name: str, directory: Path, key: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise ConfigError(
            [
                f"{key}: {name!r} found, but there is no directory {directory.absolute()} and no model of that"
                f" name in the Hugging Face cache {HF_HUB_CACHE}"
                " (nothing is downloaded; HF_HUB_CACHE or HF_HOME name another cache)"
            ]
        ) from error


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
