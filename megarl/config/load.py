"""From the command line to a checked `Config`: compose with Hydra, name every problem, suggest the right key."""

import copy
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.config import brought
from megarl.config.checks.config import check_config
from megarl.config.checks.keys import find_unused
from megarl.config.errors import ConfigError, find_nearest_key
from megarl.config.names import Rewritten, find_old_name, find_peer_name, rewrite_overrides
from megarl.config.overrides import (
    CONF_DIR,
    check_words,
    find_choices_with,
    find_hidden_files,
    is_search_path,
    list_config_dirs,
    list_options,
    list_set_keys,
    open_overrides,
)
from megarl.config.schema.root import Config, register
from megarl.config.schema.run import NO_QUANTIZED_WEIGHTS
from megarl.config.schema.task import SCHEMAS
from megarl.config.values import list_values

MAX_CHECKED_SWEEP_RUNS = 256


@dataclass(frozen=True)
class Loaded:
    """A checked configuration and what it was composed from."""

    config: Config
    overrides: list[str]
    """Those that Hydra composes to it"""
    lines: list[str]
    """For each thing that is not as it was typed"""


def load_config(overrides: Sequence[str], command: str = "train") -> Config:
    """The configuration alone that `load` gives."""
    return load(overrides, command).config


def load(overrides: Sequence[str], command: str = "train") -> Loaded:
    """The checked configuration of `python -m megarl.COMMAND` for these `key=value` overrides, ROLL's names included.

    A model that a run wrote brings settings of that run (megarl/config/brought.py), which what is given replaces.
    Raises ConfigError, naming each key, what was found and what would be right; so does a key that the overrides set
    and that has no effect. Of those of the chosen conf/experiment/NAME.yaml `list_left_out` tells.
    """
    check_words(overrides)
    rewritten = rewrite_overrides(overrides)
    composed, completed, lines = _settle(rewritten, command)
    config = to_config(composed)
    typed = {key: key for text in rewritten.overrides for key in list_set_keys(text)}
    typed |= {key: f"{key} (from {origin})" for key, origin in rewritten.origins.items() if key in typed}
    if unused := [f"{typed[key]}: {reason}" for key, reason in find_unused(config, typed, command)]:
        raise ConfigError(unused)
    return Loaded(config, completed, lines)


def complete_overrides(overrides: Sequence[str], command: str = "train") -> tuple[list[str], list[str]]:
    """The overrides and the lines of `load`, whose values may contradict one another. Raises ConfigError."""
    return _settle(rewrite_overrides(overrides), command)[1:]


def _settle(rewritten: Rewritten, command: str) -> tuple[DictConfig, list[str], list[str]]:
    """What the overrides compose to with the settings that the model brings; all of them, and the lines that say so."""
    overrides, lines = rewritten.overrides, list(rewritten.lines)
    try:
        composed = _compose(overrides)
        settings = brought.find_run_settings(composed.model.source, composed.model.path)
    except ConfigError:
        # A key may be one of the kind of data or reward that the model brings.
        composed = _compose([text for text in overrides if text.split(".")[0] not in SCHEMAS])
        settings = brought.find_run_settings(composed.model.source, composed.model.path)
        if settings is None:
            raise
    if settings is None:
        return composed, list(overrides), lines
    experiment = _list_experiment_keys(overrides)
    typed = dict.fromkeys([*experiment, *(key for text in overrides for key in list_set_keys(text))], "")
    choices = [text.lstrip("+").partition("=") for text in overrides if _is_choice(text, overrides)]
    typed |= _list_experiment_groups(overrides) | {group: option for group, _, option in choices}
    kinds = brought.choose_kinds(settings, composed, typed)
    if kinds:
        composed = _compose([*brought.write_overrides(kinds, {}), *overrides])
    values = brought.choose_values(settings, composed, typed, kinds, command)
    unused = {key for key, _ in find_unused(_fill(composed, values), values, command)}
    values = {key: value for key, value in values.items() if key not in unused}
    added = list(brought.write_overrides(kinds, values))
    if added:
        lines.append(brought.describe_brought(composed.model.path, settings, added))
    return _compose([*added, *overrides]) if values else composed, [*added, *overrides], lines


def _fill(composed: DictConfig, values: Mapping[str, Any]) -> Config:
    """With these values, and with "" for a key that a run must give and that is not there yet."""
    filled = copy.deepcopy(composed)
    for key, value in values.items():
        OmegaConf.update(filled, key, value, force_add=True)
    for key in OmegaConf.missing_keys(filled):
        OmegaConf.update(filled, key, "")
    return _to_dataclasses(filled)


def list_left_out(overrides: Sequence[str], config: Config) -> list[str]:
    """A line for each key of the chosen conf/experiment/NAME.yaml that has no effect in `config`, which these overrides
    gave: under another algorithm than the file was written for. What one command alone reads is not listed."""
    rewritten = rewrite_overrides(overrides).overrides
    found = _list_experiment_keys(rewritten)
    keys = sorted(found.keys() - {key for text in rewritten for key in list_set_keys(text)})
    return [f"left out: {found[key]}: {reason}" for key, reason in find_unused(config, keys, None)]


def compose_config(overrides: Sequence[str]) -> Config:
    """What these overrides, with our names, compose to; its values may contradict one another.

    Raises ConfigError for unknown keys and values of the wrong type.
    """
    return _to_dataclasses(_compose(overrides))


def list_preset_values(overrides: Sequence[str]) -> dict[str, Any]:
    """The value of each dotted key of what these overrides compose to; None for a key that a run must give, such as
    reward.path. Raises ConfigError as `compose_config` does.
    """
    composed = _compose(overrides)
    required = OmegaConf.missing_keys(composed)
    for key in required:
        OmegaConf.update(composed, key, "")
    return dict(list_values(_to_dataclasses(composed))) | dict.fromkeys(required)


def find_choices(overrides: Sequence[str]) -> dict[str, str]:
    """The option of each group of conf/ under these overrides, those that an experiment's file chooses included.

    Raises ConfigError.
    """
    choices = _compose(overrides, with_hydra=True).hydra.runtime.choices.items()
    return {group: option for group, option in choices if option is not None and "/" not in group}


def to_config(composed: DictConfig) -> Config:
    """A composed tree as plain dataclasses, checked. Raises ConfigError."""
    config = _to_dataclasses(composed)
    problems = check_config(config)
    if problems:
        raise ConfigError(problems)
    return config


def _to_dataclasses(composed: DictConfig) -> Config:
    unknown = list(_find_unknown_keys(composed))
    if unknown:
        known = [key for key in list_keys(composed) if not _is_at_or_below(key, unknown)]
        raise ConfigError([f"{key}: no such key{_suggest(key, known)}" for key in unknown])
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError([_describe(error)]) from error
    if not isinstance(config, Config):
        raise ConfigError(
            [f"the composed configuration is a {type(config).__name__}; conf/config.yaml must list `schema` first"]
        )
    return config


def check_overrides(overrides: Sequence[str], command: str = "train") -> None:
    """Compose and check every run that these overrides describe, sweeps (`key=a,b`) included, before any starts.

    Raises ConfigError. Of a sweep with more than 256 runs each value is checked once beside the first of the others; of
    an interval that Optuna searches, its ends.
    """
    check_words(overrides)
    for run in expand_sweep(overrides):
        load_config(run, command)


def list_keys(config: DictConfig) -> list[str]:
    """Every dotted key of a composed configuration, groups included."""
    return list(_walk(OmegaConf.to_container(config, resolve=False), ""))


def _walk(tree: Any, prefix: str) -> Iterator[str]:
    if isinstance(tree, dict):
        for name, child in tree.items():
            yield f"{prefix}{name}"
            yield from _walk(child, f"{prefix}{name}.")


def _compose(overrides: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
    register()
    check_words(overrides)
    hidden = list(find_hidden_files(overrides))
    if hidden:
        raise ConfigError(hidden)
    # A notebook, or the command around this, may be using Hydra itself: it gets its own state back.
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3", job_name="megarl"):
            composed = compose("config", overrides=open_overrides(overrides), return_hydra_config=with_hydra)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([_describe(error, overrides)]) from error
    finally:
        GlobalHydra.instance().hydra = outer
    wrong = list(_find_numbers_as_switches(composed, overrides))
    if wrong:
        raise ConfigError(wrong)
    return composed


def _find_numbers_as_switches(composed: DictConfig, overrides: Sequence[str]) -> Iterator[str]:
    """Numbers besides 0 and 1 for keys that are true or false; OmegaConf takes them for true."""
    for override in _parse(overrides):
        key, value = override.key_or_group, override.value()
        is_other = isinstance(value, int) and value not in (0, 1)
        if is_other and isinstance(OmegaConf.select(composed, key), bool):
            yield f"{key}: found {value}; it must be true or false"


def _describe(error: Exception, overrides: Sequence[str] = ()) -> str:
    """Hydra's message, shortened to its cause, with the nearest right key or the choices."""
    text = str(error)
    named = re.search(r"Could not override '([^']+)'", text)
    if named:
        known = list_keys(_compose([text for text in overrides if is_search_path(text) or _is_choice(text, overrides)]))
        return f"{named.group(1)}: no such key{_suggest(named.group(1), known)}"
    if "SLURM_JOB_NUM_NODES" in text:
        return (
            "cluster: slurm takes its nodes from a Slurm job, and this is none (SLURM_JOB_NUM_NODES is not set):"
            " sbatch slurm/train.sh, or another cluster="
        )
    missing = re.search(r"Could not find '([^/']+)/([^']+)'", text)
    if missing:
        group, option = missing.groups()
        if (now := find_old_name(f"{group}={option}")) is not None:
            return f"{group}: found {option!r}{now}"
        choices = ", ".join(list_options(group, overrides))
        hint = f"the choices are {choices}" if choices else f"there is no {CONF_DIR / group / option}.yaml"
        return f"{group}: found {option!r}; {hint}"
    if isinstance(error, OverrideParseException):
        return _describe_syntax(error)
    cause = str(error.__cause__ or error)
    key = re.search(r"full_key: (\S+)", cause)
    first_line = cause.strip().splitlines()[0]
    if key and (source := re.match(r"In '([^']+)': ConfigKeyError", first_line)):
        chosen = [text for text in overrides if is_search_path(text)]
        return f"{key.group(1)}: no such key, in {source.group(1)}{_suggest(key.group(1), list_keys(_compose(chosen)))}"
    if key and (found := re.match(r"Invalid value '([^']+)'", first_line)):
        first_line += find_old_name(f"{key.group(1)}={found.group(1)}") or ""
    if "is not a valid bool" in first_line:
        first_line += "; it must be true or false"
    if "is not a subclass of EvalSetConfig" in first_line:
        return "train.eval_sets: a set is given whole, train.eval_sets='{NAME: {path: FILE, num_samples: 4}}'"
    if key and _takes_null(error.__cause__ or error):
        first_line += ", or null"
    if key and key.group(1) == "rollout.dtype" and re.search(r"'(fp8|float8|fp4|int8|int4)", first_line):
        first_line += f"; {NO_QUANTIZED_WEIGHTS}"
    return f"{key.group(1)}: {first_line}" if key else first_line


def _takes_null(error: BaseException) -> bool:
    """Whether the key whose value OmegaConf refuses may be null."""
    schema = getattr(error, "object_type", None)
    return is_dataclass(schema) and NoneType in get_args(get_type_hints(schema).get(str(getattr(error, "key", None))))


def _describe_syntax(error: Exception) -> str:
    """Hydra's message of an override that it cannot parse, in one line that names the override."""
    first_line = str(error).strip().splitlines()[0]
    override = getattr(error, "override", None)
    return f"{override}: {first_line}" if override else first_line


def _is_choice(override: str, overrides: Sequence[str]) -> bool:
    """Whether it selects an option of a group."""
    group = override.lstrip("+").split("=", 1)[0]
    return any((folder / group).is_dir() for folder in list_config_dirs(overrides))


def _is_at_or_below(key: str, nodes: Sequence[str]) -> bool:
    return any(key == node or key.startswith(f"{node}.") for node in nodes)


def _list_experiment_keys(overrides: Sequence[str]) -> dict[str, str]:
    """Each key that the chosen conf/experiment/NAME.yaml sets, with the name of the key and the file."""
    found: dict[str, str] = {}
    for path, tree in _load_experiments(overrides):
        keys = [key for key in _walk(tree, "") if key.split(".")[0] != "defaults"]
        leaves = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
        source = f"conf/experiment/{path.name}" if path.parents[1] == CONF_DIR else str(path)
        found |= {key: f"{key} (from {source})" for key in leaves}
    return found


def _list_experiment_groups(overrides: Sequence[str]) -> dict[str, str]:
    """The groups of which the chosen experiment's file names an option, and the option."""
    entries = [entry for _, tree in _load_experiments(overrides) for entry in tree.get("defaults", ())]
    named = [pair for entry in entries if isinstance(entry, dict) for pair in entry.items()]
    return {str(name).removeprefix("override").strip().lstrip("/"): str(option) for name, option in named}


def _load_experiments(overrides: Sequence[str]) -> Iterator[tuple[Path, dict[Any, Any]]]:
    chosen = [text.lstrip("+").partition("=")[2] for text in overrides if text.lstrip("+").startswith("experiment=")]
    for folder, name in itertools.product(list_config_dirs(overrides), chosen):
        path = folder / "experiment" / f"{name}.yaml"
        tree = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else None
        if isinstance(tree, dict):
            yield path, tree


def _suggest(key: str, known: Sequence[str]) -> str:
    if (now := find_old_name(key)) is not None:
        return now
    if choices := find_choices_with(key):
        return f"; it is a key of {', '.join(choices)}"
    if (theirs := find_peer_name(key)) is not None:
        return theirs
    nearest = find_nearest_key(key, known)
    if nearest is not None:
        return f"; did you mean {nearest}?"
    group = key.split(".")[0]
    members = sorted(name for name in known if name.startswith(f"{group}.") and name.count(".") == 1)
    if members:
        return f"; {group} has {', '.join(members)}"
    return f"; the groups are {', '.join(name for name in known if '.' not in name)}"


def _find_unknown_keys(node: Any, prefix: str = "") -> Iterator[str]:
    """Keys that were appended (`+key=value`) to a node whose dataclass has no such field."""
    if not isinstance(node, DictConfig) or node._is_missing() or node._is_none():
        return
    node_type = OmegaConf.get_type(node)
    names = {field.name for field in fields(node_type)} if is_dataclass(node_type) else None
    for name in map(str, node):
        if names is not None and name not in names:
            yield f"{prefix}{name}"
        elif not OmegaConf.is_missing(node, name):
            yield from _find_unknown_keys(node._get_node(name), f"{prefix}{name}.")


def expand_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each run, as `check_overrides` takes them; of Hydra's own only hydra.searchpath is kept."""
    searches = any(text.lstrip("+").startswith("hydra/sweeper=") for text in overrides)
    choices: list[list[str]] = []
    for text, override in zip(overrides, _parse(overrides), strict=True):
        if text.lstrip("+~").startswith("hydra") and not is_search_path(text):
            continue
        key = text.split("=", 1)[0]
        if not override.is_sweep_override():
            choices.append([text])
        elif override.is_discrete_sweep():
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        elif searches and isinstance(interval := override.value(), IntervalSweep):
            choices.append([f"{key}={value}" for value in (interval.start, interval.end)])
        else:
            found = text.partition("=")[2]
            raise ConfigError([f"{key}: found {found}, which hydra/sweeper=optuna can search; else list the values"])
    num_runs = 1
    for options in choices:
        num_runs *= len(options)
    if num_runs <= MAX_CHECKED_SWEEP_RUNS:
        return [list(run) for run in itertools.product(*choices)]
    firsts = [options[0] for options in choices]
    return [[*firsts[:i], value, *firsts[i + 1 :]] for i, options in enumerate(choices) for value in options]


def _parse(overrides: Sequence[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError([_describe_syntax(error)]) from error
