"""Random weights of a small architecture and a tokenizer of single characters, as a checkpoint directory."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.schema.model import RandomModelConfig
from megarl.families.registry import FAMILIES, build_random_fields
from megarl.hf.cache import build_once

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
PAD, BOS, EOS = SPECIAL_TOKENS
MAX_PARAMETERS = 10**9
FORMAT = 2
"""Part of the content hash: raise it when what is written changes for the same numbers."""


def build_random_checkpoint(config: RandomModelConfig, cache_dir: Path) -> Path:
    """The checkpoint of these numbers under `cache_dir`/random, float32; same numbers, same weights.

    Raises ConfigError naming the keys of model.random that do not fit together.
    """
    problems = check_random_model(config)
    if problems:
        raise ConfigError(problems)
    content = json.dumps({"format": FORMAT, **asdict(config)}, sort_keys=True)
    name = f"{config.family}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    return build_once(cache_dir / "random" / name, lambda directory: _write_checkpoint(config, directory))


def check_random_model(config: RandomModelConfig) -> list[str]:
    """What is wrong with the numbers: one message each, naming the key."""
    problems: list[str] = []
    if config.family not in FAMILIES:
        found = f"model.random.family: found {config.family!r}; it must be one of {', '.join(FAMILIES)}"
        return [found]
    problems += _check_unused(config)
    sizes = ("num_layers", "hidden_size", "ffn_size", "num_heads", "num_kv_heads", "max_length")
    for key in (*sizes, "num_experts", "experts_per_token"):
        if getattr(config, key) < 1:
            problems.append(f"model.random.{key}: found {getattr(config, key)}; it must be 1 or more")
    if config.init_std <= 0:
        problems.append(f"model.random.init_std: found {config.init_std}; it must be above 0")
    repeated = sorted({char for char in config.alphabet if config.alphabet.count(char) > 1})
    if repeated or not config.alphabet:
        found = f"{''.join(repeated)!r} more than once" if repeated else "no characters"
        problems.append(f"model.random.alphabet: found {found}; it must hold every character exactly once")
    if problems:
        return problems
    if config.hidden_size % config.num_heads or config.hidden_size // config.num_heads % 2:
        problems.append(
            f"model.random.hidden_size: found {config.hidden_size};"
            f" over num_heads={config.num_heads} it must give an even head size"
        )
    if config.num_heads % config.num_kv_heads:
        problems.append(
            f"model.random.num_kv_heads: found {config.num_kv_heads}; it must divide num_heads={config.num_heads}"
        )
    if FAMILIES[config.family].has_experts and not 2 <= config.experts_per_token <= config.num_experts:
        problems.append(
            f"model.random.experts_per_token: found {config.experts_per_token}; it must be between 2 and"
            f" num_experts={config.num_experts}: the weights of a token's experts are normalized, so that a single"
            " one would always weigh 1 and nothing would train the router"
        )
    size = _count_parameters(config)
    if size > MAX_PARAMETERS:
        problems.append(
            f"model.random: found numbers that make {size} parameters; the checkpoint is made in memory, in float32:"
            f" {MAX_PARAMETERS} at most"
        )
    return problems


def _count_parameters(config: RandomModelConfig) -> int:
    """About as many as the model has: its matrices, without norms and biases."""
    experts = config.num_experts if FAMILIES[config.family].has_experts else 1
    layer = 4 * config.hidden_size**2 + 3 * config.hidden_size * config.ffn_size * experts
    return config.num_layers * layer + 2 * len(config.alphabet) * config.hidden_size


def _check_unused(config: RandomModelConfig) -> Iterator[str]:
    """What was set of a mixture of experts for a family that has none."""
    defaults = RandomModelConfig()
    for key in () if FAMILIES[config.family].has_experts else ("num_experts", "experts_per_token"):
        if getattr(config, key) != getattr(defaults, key):
            fitting = ", ".join(name for name, family in FAMILIES.items() if family.has_experts)
            yield (
                f"model.random.{key}: found {getattr(config, key)}, but model.random.family={config.family} has no"
                f" experts; it counts with {fitting}"
            )


def build_character_tokenizer(alphabet: str, max_length: int) -> Any:
    """A transformers fast tokenizer: <pad>, <bos>, <eos>, then one token per character, in alphabet order.

    Encoding adds no special tokens; a character outside the alphabet raises, as the model has no token for it.
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
    hf_config = getattr(transformers, f"{family}Config")(**fields, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = getattr(transformers, f"{family}ForCausalLM")(hf_config).float()
        # transformers makes the row of <pad> zero. The policy can sample <pad>, and RMSNorm's gradient at zero is
        # 1 / sqrt(eps) times that elsewhere. Checkpoints of real models have no row of zeros for it either.
        torch.nn.init.normal_(model.get_input_embeddings().weight.data[tokenizer.pad_token_id], std=config.init_std)
    model.generation_config = transformers.GenerationConfig(**ids)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
