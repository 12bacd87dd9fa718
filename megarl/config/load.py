"""From the command line to a checked `Config`: compose with Hydra, name every problem, suggest the right key.

A model that a run wrote brings along that run's lengths, dtypes, prompt format, stop tokens, data and reward: a run's
directory records its configuration in run.json, and a model that is taken out of it carries a copy. Recorded values of
a fixed list of keys, and of the groups that nobody typed, are put before what is typed.
"""

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import prod
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import IntervalSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.config.checks import check_config, find_unused
from megarl.config.errors import ConfigError, find_nearest_key
from megarl.config.names import Rewritten, find_old_name, find_peer_name, rewrite_overrides
from megarl.config.overrides import (
    CONF_DIR,
    OPTIONS,
    check_words,
    find_choices_with,
    is_search_path,
    list_config_dirs,
    list_leaves,
    list_options,
    list_set_keys,
    list_values,
    open_overrides,
    parse_override,
    to_plain,
    write_value,
)
from megarl.config.schema.mix import OF_RUN, list_sources
from megarl.config.schema.roles import ModelSource
from megarl.config.schema.root import Config, check_truncation, get_temperature, register
from megarl.config.schema.task import SCHEMAS, FileDataConfig, FunctionDataConfig, MixDataConfig
from megarl.files import RUN_FILE, load_json_object

MAX_CHECKED_SWEEP_RUNS = 256
MODEL_FILE = "megarl.json"
"""The copy in the directory of a model, which may be moved"""
SAMPLING = ("seed", "rollout.response_length", "rollout.stop", "rollout.stop_token_ids", "rollout.dtype")
DTYPE_KEYS = ("policy.dtype", "critic.dtype", "reference.dtype")
OF_A_CPU = ("rollout.kv_cache_tokens", "rollout.max_running_requests")
"""What a server without a GPU has to be told"""
FORMAT = (
    *("data.prompt_length", "data.chat_template", "data.chat_template_path", "data.system", "data.instruction"),
    *("data.template_inputs", "data.response_prefix"),
)
"""How a question is put to the policy, whatever the data are"""
OF_ONE_SET = ("data.path", "data.heldout_path", "data.subset", "data.split", "data.heldout_split")
"""Keys that can be right for one set of problems only"""
OF_THE_CRITIC = ("data.critic_prompt", "data.critic_prompt_length")
NAMES_CODE = (
    *("reward.path", "reward.url", "reward.parts", "data.sources", "data.common"),
    *("environment.path", "environment.tools", "environment.id", "data.id", "data.path"),
)
"""Keys that name code, or a server to which responses and a key are sent"""
HELDOUT, NUM_HELDOUT_USED = "evaluate.heldout", "train.num_eval_prompts"


@dataclass(frozen=True)
class RunSettings:
    """The configuration of the run that wrote a model."""

    file: Path
    values: Mapping[str, Any]
    """The plain value of each dotted key, and the class of each group"""

    @property
    def knows_data(self) -> bool:
        """Whether the run asked for responses itself; with rollout.file its data are another's."""
        return self.values.get("rollout.file") is None and self.find_kind("data") is not None

    def find_kind(self, group: str) -> str | None:
        """The option of data=, environment= or reward= with the run's schema."""
        kinds = {schema.__name__: kind for kind, schema in SCHEMAS.get(group, {}).items()}
        return kinds.get(self.values.get(group, ""))

    def check_trust(self, prefixes: Collection[str], typed: Collection[str] = ()) -> None:
        """Raise ConfigError where a model apart from its run names code, or a server, in the keys below `prefixes`.

        A model may be somebody else's; a run's directory is as trusted as resume= takes it. typed: keys that do not
        count.
        """
        for key in NAMES_CODE if self.file.name == MODEL_FILE else ():
            value = self.values.get(key)
            if self._is_others_code(key, value) and key not in typed and key.startswith(tuple(prefixes)):
                found = f"{key}: the run that wrote the model had {value!r} ({self.file})"
                right = f"type {key.partition('.')[0]}= and its keys"
                raise ConfigError(
                    [f"{found}; code and servers are taken from the run's directory, not from a model's: {right}"]
                )

    def _is_others_code(self, key: str, value: Any) -> bool:
        if key == "environment.tools":  # The tools that megarl has are names alone.
            return any(":" in str(each) for each in value or ())
        if key == "data.path" and self.values["data"] != FunctionDataConfig.__name__:  # A file or a dataset.
            return False
        module = str(value or "").partition(":")[0]
        return bool(value) and not (module.startswith("megarl.examples.") and not module.endswith(".py"))

    def choose_kinds(self, composed: DictConfig, typed: Collection[str]) -> dict[str, str]:
        """The groups that the model brings, and their options.

        composed: what was typed. typed: its groups and dotted keys. Raises ConfigError as `check_trust`.
        """
        groups = {"data", "environment", "reward"}.difference(typed)
        if self.values.get("rollout.from_data"):  # Its data were answers to imitate, which nothing scored.
            groups = set()
        of_files = {schema.__name__ for schema in SCHEMAS["data"].values() if issubclass(schema, FileDataConfig)}
        chosen = getattr(OmegaConf.get_type(composed, "data"), "__name__", "")
        if "data" in typed and not {chosen, self.values["data"]} <= of_files:
            groups.discard("reward")  # that of generated problems scores no others
        kinds = {group: kind for group in sorted(groups) if self.knows_data and (kind := self.find_kind(group))}
        self.check_trust([f"{group}." for group in kinds], typed)
        if self.values.get("cluster.gpus_per_node") == 0 and not any(key.split(".")[0] == "cluster" for key in typed):
            kinds["cluster"] = "laptop"
        return kinds

    def choose_values(
        self, composed: DictConfig, typed: Collection[str], kinds: Mapping[str, str], command: str
    ) -> dict[str, Any]:
        """The values that the model brings, by dotted key. composed: what was typed, with `kinds`."""
        keys = [*SAMPLING, *DTYPE_KEYS, *(FORMAT if self.knows_data else ())]
        chosen_schemas = {group: SCHEMAS[group][kind] for group, kind in kinds.items() if group in SCHEMAS}
        keys += [f"{group}.{each.name}" for group, schema in chosen_schemas.items() for each in fields(schema)]
        if self.values.get("cluster.gpus_per_node") == composed.cluster.gpus_per_node == 0:
            keys += OF_A_CPU
        if any(key in typed for key in OF_ONE_SET):
            keys = [key for key in keys if key not in OF_ONE_SET]
        # Those that are typed as parts of a node, or as the node that they are a part of.
        nodes = [f"{key}." for key in typed if "." in key or key == "seed"]
        keys = [key for key in keys if not any(f"{key}.".startswith(n) or n.startswith(f"{key}.") for n in nodes)]
        chosen = {key: self.values[key] for key in keys if key in self.values and key not in OF_THE_CRITIC}
        if command == "evaluate" and not any(key.startswith("evaluate.paths") for key in typed):
            of_split = [key for key in typed if key == "seed" or (key.startswith("data.") and key not in FORMAT)]
            if HELDOUT not in typed and "data" in kinds and not of_split:
                chosen[HELDOUT] = True
            if (chosen.get(HELDOUT) or composed.evaluate.heldout) and NUM_HELDOUT_USED not in typed:
                chosen[NUM_HELDOUT_USED] = self.values.get(NUM_HELDOUT_USED, composed.train.num_eval_prompts)
        found = {key: OmegaConf.select(composed, key, throw_on_missing=False) for key in chosen}
        return {key: value for key, value in chosen.items() if to_plain(found[key]) != value}


def find_run_settings(chosen: DictConfig) -> RunSettings | None:
    """Those of the run that wrote the model in this directory; None where none did, and for a model of another source.

    chosen: the group `model`. Raises ConfigError for a file that is not what a run writes.
    """
    is_path = chosen.source is ModelSource.path and isinstance(chosen.path, str)
    if not is_path or not (model := Path(chosen.path).expanduser()).is_dir():
        return None
    for file in (model.resolve().parent / RUN_FILE, model / MODEL_FILE):
        if file.is_file():
            try:
                content = load_json_object(file)
                values = dict(content["config"])
                values["rollout.response_length"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ConfigError([f"model.path: {file} is not what a run writes: {error!r}"]) from None
            return RunSettings(file, _find_files(values, Path(str(content.get("directory", Path.cwd())))))
    return None


def _find_files(values: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The values with names of files that were relative to the run's working directory as they are from here."""

    def find(value: Any) -> Any:
        if isinstance(value, list):
            return [find(each) for each in value]
        name, colon, rest = value.partition(":") if isinstance(value, str) else ("", "", "")
        is_elsewhere = name and not Path(name).is_absolute() and directory.resolve() != Path.cwd().resolve()
        return f"{directory / name}{colon}{rest}" if is_elsewhere and (directory / name).exists() else value

    named = re.compile(r"(data|environment|reward|model)\.(\w*path|tools|id)")
    return {key: find(value) if named.fullmatch(key) else value for key, value in values.items()}


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

    A model that a run wrote brings settings of that run, which what is given replaces.
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


def _settle(rewritten: Rewritten, command: str) -> tuple[DictConfig, list[str], list[str]]:
    """What the overrides compose to with the settings that the model brings; all of them, and the lines that say so."""
    overrides, lines = rewritten.overrides, list(rewritten.lines)
    try:
        composed = _compose(overrides)
    except ConfigError:
        # A key may be one of the kind of data or reward that the model brings.
        composed = _compose([text for text in overrides if text.split(".")[0] not in SCHEMAS])
        if find_run_settings(composed.model) is None:
            raise
    if (settings := find_run_settings(composed.model)) is None:
        return composed, list(overrides), lines
    keys, groups = _read_experiments(overrides)
    typed = {*keys, *groups, *(key for text in overrides for key in list_set_keys(text))}
    typed |= {text.lstrip("+").partition("=")[0] for text in overrides if _is_choice(text, overrides)}
    kinds = settings.choose_kinds(composed, typed)
    chosen = [f"{group}={kind}" for group, kind in kinds.items()]
    values = settings.choose_values(_compose([*chosen, *overrides]), typed, kinds, command)
    added = {key: f"{key}={write_value(value)}" for key, value in values.items()}
    composed = _compose([*chosen, *added.values(), *overrides])
    if unused := dict(find_unused(_to_dataclasses(composed), added, command)):
        # A kind of data or reward that has no effect still requires its path.
        required = OmegaConf.missing_keys(_compose([*chosen, *overrides]))
        added = {key: text for key, text in added.items() if key not in unused or key in required}
        composed = _compose([*chosen, *added.values(), *overrides])
    chosen += added.values()
    if chosen:  # A prompt's text may have several lines.
        shown = " ".join(chosen).replace("\n", "\\n")
        lines.append(f"model.path: {composed.model.path} was written by a run; taken from {settings.file}: {shown}")
    return composed, [*chosen, *overrides], lines


def list_left_out(overrides: Sequence[str], config: Config) -> list[str]:
    """A line for each key of the chosen conf/experiment/NAME.yaml that has no effect in `config`, which these overrides
    gave: under another algorithm than the file was written for. What one command alone reads is not listed."""
    rewritten = rewrite_overrides(overrides).overrides
    found, _ = _read_experiments(rewritten)
    keys = sorted(found.keys() - {key for text in rewritten for key in list_set_keys(text)})
    return [f"left out: {found[key]}: {reason}" for key, reason in find_unused(config, keys, None)]


def compose_config(overrides: Sequence[str]) -> Config:
    """What these overrides, with our names, compose to; its values may contradict one another. Raises ConfigError."""
    return _to_dataclasses(_compose(overrides))


def find_choices(overrides: Sequence[str]) -> dict[str, str]:
    """The option of each group of conf/ under these overrides, an experiment's included. Raises ConfigError."""
    choices = _compose(overrides, with_hydra=True).hydra.runtime.choices.items()
    return {group: option for group, option in choices if option is not None and "/" not in group}


def find_changes(overrides: Sequence[str], values: Mapping[str, Any]) -> tuple[list[str], dict[str, tuple[Any, Any]]]:
    """The options of groups that a run chose, an experiment's among them, and (their value, the run's) of each key that
    differs. values: the run's, by dotted key. Raises ConfigError where the overrides do not compose here.
    """
    paths = [text for text in overrides if is_search_path(text)]
    groups = [text for text in overrides if (CONF_DIR / re.split("[=@]", text.lstrip("+~"))[0]).is_dir()]
    found, defaults = find_choices([*groups, *paths]), find_choices([])
    chosen = {f"{group}={name}": name != defaults.get(group) for group, name in found.items()}
    choices = [text for text, is_other in chosen.items() if is_other or text in groups]
    choices = [text for text in choices if not text.startswith("experiment=")]
    composed = _compose([*choices, *paths])
    required = OmegaConf.missing_keys(composed)  # those that a run must give, such as reward.path
    for key in required:
        OmegaConf.update(composed, key, "")
    preset = dict(list_values(_to_dataclasses(composed))) | dict.fromkeys(required)
    return choices, {key: (preset.get(key), value) for key, value in values.items() if preset.get(key) != value}


def to_config(composed: DictConfig, overrides: Sequence[str] = ()) -> Config:
    """A composed tree as plain dataclasses, checked. overrides: that Hydra has composed it from. Raises ConfigError."""
    _open_presets(composed, overrides)
    config = _to_dataclasses(composed)
    if problems := check_config(config):
        raise ConfigError(problems)
    return config


def _to_dataclasses(composed: DictConfig) -> Config:
    if unknown := list(_find_unknown_keys(composed)):
        nodes = tuple(f"{key}." for key in unknown)
        known = [key for key in list_keys(composed) if not f"{key}.".startswith(nodes)]
        raise ConfigError([f"{key}: no such key{_suggest(key, known)}" for key in unknown])
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ConfigError([_describe(error)]) from error
    assert isinstance(config, Config), "conf/config.yaml must list `schema` first"
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
    leaves = [key.split(".") for key, _ in list_leaves(OmegaConf.to_container(config, resolve=False))]
    return list(dict.fromkeys(".".join(parts[:size]) for parts in leaves for size in range(1, len(parts) + 1)))


def _compose(overrides: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
    register()
    check_words(overrides)
    own = [(folder, file) for folder in list_config_dirs(overrides)[1:] for file in sorted(folder.rglob("*.yaml"))]
    hidden = [(file, name) for folder, file in own if (CONF_DIR / (name := file.relative_to(folder))).is_file()]
    if hidden:  # Hydra would read megarl's.
        right = "which would be read; rename yours"
        raise ConfigError([f"{OPTIONS[0]}: {file}: megarl has a {name} too, {right}" for file, name in hidden])
    # A notebook, or the command around this, may be using Hydra itself: it gets its own state back.
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3", job_name="megarl"):
            composed = compose("config", overrides=open_overrides(overrides), return_hydra_config=with_hydra)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([_describe(error, overrides)]) from error
    finally:
        GlobalHydra.instance().hydra = outer
    _open_presets(composed, overrides)
    return composed


def _open_presets(composed: DictConfig, overrides: Sequence[str]) -> None:
    """Put what a preset that a source of data=mix names as its kind (gsm8k) says in its place, with the kind that it is
    of. Once is enough. Raises ConfigError."""
    if OmegaConf.get_type(composed, "data") is not MixDataConfig:
        return
    mix, paths = composed.data, [text for text in overrides if is_search_path(text)]
    nodes = {f"data.sources.{name}": node for name, node in mix.sources.items()} | {"data.common": mix.common}
    for key, node in ((key, node) for key, node in nodes.items() if isinstance(node, DictConfig)):
        for group, own in (("data", node), *((it, node.get(it)) for it in ("environment", "reward"))):
            kind = own.get("kind") if isinstance(own, DictConfig) else None
            if not isinstance(kind, str) or kind in SCHEMAS[group]:
                continue
            if kind not in (options := [each for each in list_options(group, paths) if each != "mix"]):
                where = key if group == "data" else f"{key}.{group}"
                raise ConfigError([f"{where}.kind: found {kind!r}; the choices are {', '.join(options)}"])
            preset = _compose([*paths, f"{group}={kind}"])[group]
            schema, values = OmegaConf.get_type(preset), OmegaConf.to_container(preset, resolve=True)
            assert isinstance(values, dict)
            before = OmegaConf.structured(schema)
            given = {**own, "prompt_length": None} | dict.fromkeys(OF_RUN)
            for option, value in values.items():
                if option not in given and (OmegaConf.is_missing(before, option) or before[option] != value):
                    OmegaConf.update(own, str(option), value, force_add=True)
            own.kind = next(name for name, each in SCHEMAS[group].items() if each is schema)


def _describe(error: Exception, overrides: Sequence[str] = ()) -> str:
    """Hydra's message, shortened to its cause, with the nearest right key or the choices."""
    text, override = str(error), getattr(error, "override", None)
    cause = str(error.__cause__ or error)
    key = re.search(r"full_key: (\S+)", cause)
    if named := re.search(r"Could not override '([^']+)'", text):
        # The longer one: of a dictionary the cause has the key, of a key below an unknown group the group.
        name = max(named.group(1), key.group(1) if key else "", key=len)
        known = list_keys(_compose([text for text in overrides if is_search_path(text) or _is_choice(text, overrides)]))
        return f"{name}: no such key{_suggest(name, known)}"
    if "SLURM_JOB_NUM_NODES" in text:
        return (
            "cluster: slurm takes its nodes from a Slurm job, and this is none (SLURM_JOB_NUM_NODES is not set):"
            " sbatch slurm/train.sh, or another cluster="
        )
    if missing := re.search(r"Could not find '([^/']+)/([^']+)'", text):
        group, option = missing.groups()
        choices = ", ".join(list_options(group, overrides))
        hint = f"; the choices are {choices}" if choices else f"; there is no {CONF_DIR / group / option}.yaml"
        return f"{group}: found {option!r}{find_old_name(f'{group}={option}') or hint}"
    first_line = cause.strip().splitlines()[0]
    if key is None:
        return f"{override}: {first_line}" if override else first_line
    if source := re.match(r"In '([^']+)': ConfigKeyError", first_line):
        known = list_keys(_compose([*filter(is_search_path, overrides)]))
        return f"{key.group(1)}: no such key, in {source.group(1)}{_suggest(key.group(1), known)}"
    if found := re.match(r"Invalid value '([^']+)'", first_line):
        first_line += find_old_name(f"{key.group(1)}={found.group(1)}") or ""
    if "is not a valid bool" in first_line:
        first_line += "; it must be true or false"
    if "is not a subclass of EvalSetConfig" in first_line:
        return "train.eval_sets: a set is given whole, train.eval_sets='{NAME: {path: FILE, num_samples: 4}}'"
    return f"{key.group(1)}: {first_line}"


def _is_choice(override: str, overrides: Sequence[str]) -> bool:
    """Whether it selects an option of a group."""
    group, _, option = override.lstrip("+").partition("=")
    return not option.startswith("{") and any((folder / group).is_dir() for folder in list_config_dirs(overrides))


def _read_experiments(overrides: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    """Each key that the chosen conf/experiment/NAME.yaml sets, with the name of the key and the file; the groups of
    which it names an option."""
    found: dict[str, str] = {}
    groups: set[str] = set()
    chosen = [text.lstrip("+").partition("=")[2] for text in overrides if text.lstrip("+").startswith("experiment=")]
    for folder, name in itertools.product(list_config_dirs(overrides), chosen):
        path = folder / "experiment" / f"{name}.yaml"
        tree = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else None
        if isinstance(tree, dict):
            entries = [entry for entry in tree.pop("defaults", ()) if isinstance(entry, dict)]
            groups |= {str(key).removeprefix("override").strip().lstrip("/") for entry in entries for key in entry}
            source = f"conf/experiment/{path.name}" if folder == CONF_DIR else str(path)
            found |= {key: f"{key} (from {source})" for key, _ in list_leaves(tree)}
    return found, groups


def list_typed(overrides: Sequence[str]) -> set[str]:
    """The dotted keys that these overrides and the chosen conf/experiment/NAME.yaml set."""
    return {*_read_experiments(overrides)[0], *(key for text in overrides for key in list_set_keys(text))}


def _suggest(key: str, known: Sequence[str]) -> str:
    if (now := find_old_name(key)) is not None:
        return now
    if choices := find_choices_with(key):
        return f"; it is a key of {', '.join(choices)}"
    if (theirs := find_peer_name(key)) is not None:
        return theirs
    if (nearest := find_nearest_key(key, known)) is not None:
        return f"; did you mean {nearest}?"
    group = key.split(".")[0]
    members = sorted(name for name in known if name.startswith(f"{group}.") and name.count(".") == 1)
    what = f"{group} has" if members else "the groups are"
    return f"; {what} {', '.join(members or [name for name in known if '.' not in name])}"


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
    for text, override in zip(overrides, map(parse_override, overrides), strict=True):
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
    if prod(map(len, choices)) <= MAX_CHECKED_SWEEP_RUNS:
        return [list(run) for run in itertools.product(*choices)]
    firsts = [options[0] for options in choices]
    return [[*firsts[:i], value, *firsts[i + 1 :]] for i, options in enumerate(choices) for value in options]


def expand_sets(overrides: Sequence[str]) -> dict[str, list[str]]:
    """The overrides of each set named by data=a,b,c, by set.

    The reward is the given one, else the verifier with the set's name, else `math`. With experiment=NAME its reward is
    the default, and so are its data; a model that a run wrote brings that run's. Raises ConfigError.
    """
    keys = [text.lstrip("+").split("=", 1)[0] for text in overrides]
    if "data" not in keys:
        if "experiment" in keys:
            return {find_choices(overrides)["data"]: list(overrides)}
        brought = _find_brought(overrides)
        if kind := brought.get("data"):
            # Of data=function the name of the function says which data they are.
            maker = brought.get("data.path") if kind == "function" else None
            return {maker.strip("'\"").rpartition(":")[2] if maker else kind: list(overrides)}
    choices, rewards = list_options("data", overrides), list_options("reward", overrides)
    names = [name for text in overrides if text.startswith("data=") for name in text[len("data=") :].split(",")]
    if not names or len(set(names)) < len(names) or not set(names) <= set(choices):
        found = f"data: found {','.join(names) or 'nothing'}; name each set once, as in data=gsm8k,aime24"
        own = "model=checkpoint model.path=RUN_DIR/policy, which a run wrote, brings that run's"
        raise ConfigError([f"{found}; the choices are {', '.join(choices)}; {own}"])
    if len(names) > 1 and (of_one := [key for key in keys if key in OF_ONE_SET]):
        right = "evaluate.paths.NAME=FILE gives each its own"
        raise ConfigError([f"{key}: can be right for one set only, found with {len(names)}; {right}" for key in of_one])
    shared = [text for text in overrides if not text.startswith("data=")]
    runs: dict[str, list[str]] = {}
    for name in names:
        runs[name] = [f"data={name}", *shared]
        if not {"reward", "experiment"} & set(keys) and "reward" not in _find_brought(runs[name]):
            runs[name].insert(1, f"reward={name if name in rewards else 'math'}")
    return runs


def _find_brought(overrides: Sequence[str]) -> dict[str, str]:
    """What a model that a run wrote brings along: options of groups, and the text of values by dotted key."""
    if not any(text.startswith("model.path=") for text in overrides):
        return {}
    rewritten = rewrite_overrides(overrides)
    _, completed, _ = _settle(rewritten, "evaluate")
    return dict(text.split("=", 1) for text in completed[: len(completed) - len(rewritten.overrides)])


def load_configs(runs: dict[str, list[str]]) -> dict[str, Config]:
    """The checked configuration of each set, by set. Raises ConfigError."""
    configs: dict[str, Config] = {}
    for name, overrides in runs.items():
        config = load_config(overrides, "evaluate")
        configs |= {own: source.config for own, source in list_sources(config).items()} or {name: config}
    evaluate = next(iter(configs.values())).evaluate
    problems = list(check_truncation("evaluate", evaluate, get_temperature(evaluate)))
    for name in evaluate.paths:
        if name not in configs:
            problems.append(f"evaluate.paths.{name}: no such set; data= names {', '.join(configs)}")
        elif evaluate.heldout:
            problems.append(f"evaluate.heldout: has no effect on evaluate.paths.{name}, which takes the set's place")
    if problems:
        raise ConfigError(problems)
    return configs
