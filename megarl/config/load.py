"""From the command line to a checked `Config`: compose with Hydra, name every problem, suggest the right key."""

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.config.check import check_config
from megarl.config.errors import ConfigError, find_nearest_key
from megarl.config.schema import Config, register

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"
MAX_CHECKED_SWEEP_RUNS = 256


def load_config(overrides: Sequence[str]) -> Config:
    """The checked configuration for these `key=value` overrides.

    Raises ConfigError, naming each key, what was found and what would be right.
    """
    return to_config(_compose(overrides))


def to_config(composed: DictConfig) -> Config:
    """A composed tree as plain dataclasses, checked. Raises ConfigError."""
    tree = composed.copy()
    try:
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        raise ConfigError([_describe(error, tree)]) from error
    if not isinstance(config, Config):
        raise ConfigError(
            [f"the composed configuration is a {type(config).__name__}; conf/config.yaml must list `schema` first"]
        )
    problems = check_config(config)
    if problems:
        raise ConfigError(problems)
    return config


def check_overrides(overrides: Sequence[str]) -> None:
    """Compose and check every run that these overrides describe, sweeps (`key=a,b`) included, before any starts.

    Raises ConfigError. Of a sweep with more than 256 runs each value is checked once beside the first of the others.
    """
    for run in _expand_sweep(overrides):
        load_config(run)


def list_keys(config: DictConfig) -> list[str]:
    """Every dotted key of a composed configuration, groups included."""
    return list(_walk(OmegaConf.to_container(config, resolve=False), ""))


def _walk(tree: Any, prefix: str) -> Iterator[str]:
    if isinstance(tree, dict):
        for name, child in tree.items():
            yield f"{prefix}{name}"
            yield from _walk(child, f"{prefix}{name}.")


def _compose(overrides: Sequence[str]) -> DictConfig:
    register()
    if GlobalHydra.instance().is_initialized():
        GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3", job_name="megarl"):
            return compose("config", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([_describe(error, None)]) from error


def _describe(error: Exception, tree: DictConfig | None) -> str:
    """Hydra's message, shortened to its cause, with the nearest right key or choice."""
    text = str(error).strip()
    unknown = re.search(r"Could not override '([^']+)'", text) or re.search(r"full_key: (\S+)", text)
    not_there = "is not in struct" in text or re.search(r"Key '[^']*' not in '[^']*'", text)
    if unknown and not_there:
        key = unknown.group(1)
        return f"{key}: no such key{_suggest(key, tree)}"
    lines = [line for line in text.splitlines() if line.strip() and "object_type=" not in line]
    message = " ".join(line.strip() for line in lines)
    if unknown and not message.startswith(unknown.group(1)):
        return f"{unknown.group(1)}: {re.sub(r'full_key: .*', '', message).strip()}"
    return message


def _suggest(key: str, tree: DictConfig | None) -> str:
    known = list_keys(tree) if tree is not None else list_keys(_compose([]))
    nearest = find_nearest_key(key, known)
    if nearest is None:
        group = key.split(".")[0]
        members = sorted(name for name in known if name.startswith(f"{group}.") and name.count(".") == 1)
        return (
            f"; {group} has {', '.join(members)}"
            if members
            else f"; the groups are {', '.join(n for n in known if '.' not in n)}"
        )
    return f"; did you mean {nearest}?"


def _expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError([str(error).strip()]) from error
    choices: list[list[str]] = []
    for text, override in zip(overrides, parsed, strict=True):
        if override.is_sweep_override():
            key = text.split("=", 1)[0]
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        elif not text.startswith("hydra"):
            choices.append([text])
    num_runs = 1
    for options in choices:
        num_runs *= len(options)
    if num_runs <= MAX_CHECKED_SWEEP_RUNS:
        return [list(run) for run in itertools.product(*choices)]
    firsts = [options[0] for options in choices]
    return [[*firsts[:i], value, *firsts[i + 1 :]] for i, options in enumerate(choices) for value in options]
