"""All families: every file of this folder that has a FAMILY."""

import importlib
import pkgutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import megarl.families as folder
from megarl.config.schema.model import RandomModelConfig
from megarl.families.architecture import Architecture
from megarl.families.config_json import ConfigJson
from megarl.families.family import Family
from megarl.families.weights import Weight


def _load() -> dict[str, Family]:
    names = sorted(info.name for info in pkgutil.iter_modules(folder.__path__) if info.name != "registry")
    modules = [importlib.import_module(f"{folder.__name__}.{name}") for name in names]
    found = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    return {family.name: family for family in found}


FAMILIES = _load()
"""Descriptors by the model_type of config.json"""


def parse_architecture(content: dict[str, Any], path: Path) -> Architecture:
    """Read the content of a config.json; `path` is what the messages name.

    Raises ValueError that names the key where the model is of no family here, uses something that is not built, or has
    a key that is not read and could change the model.
    """
    return _parse(content, path)[0]


def list_unknown_keys(content: dict[str, Any], path: Path) -> list[str]:
    """A message for each key of a config.json that `parse_architecture` takes and that nothing here knows."""
    return _parse(content, path)[1]


def _parse(content: dict[str, Any], path: Path) -> tuple[Architecture, list[str]]:
    name = content.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"{path}: model_type is {name!r}; supported: {', '.join(FAMILIES)}")
    config = ConfigJson(content, path)
    architecture = FAMILIES[name].read(config)
    return architecture, config.check_rest(FAMILIES[name].only_values)


@lru_cache(maxsize=4096)
def list_weights(arch: Architecture, layer: int) -> tuple[Weight, ...]:
    """The table of a layer."""
    return tuple(FAMILIES[arch.family].list_weights(arch, layer))


def build_random_fields(random: RandomModelConfig, vocab_size: int) -> dict[str, Any]:
    """The config.json of a random model, as its class in transformers takes it."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": random.hidden_size,
        "intermediate_size": random.ffn_size,
        "num_hidden_layers": random.num_layers,
        "num_attention_heads": random.num_heads,
        "num_key_value_heads": random.num_kv_heads,
        "max_position_embeddings": random.max_length,
        "tie_word_embeddings": random.tie_embeddings,
        "initializer_range": random.init_std,
        **FAMILIES[random.family].random_fields(random),
    }
