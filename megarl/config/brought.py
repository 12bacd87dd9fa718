"""What a model that a run wrote brings along: the run's lengths, dtype, prompt format, stop tokens, reward and data.

A run's directory records its configuration in run.json, and a model that is taken out of it carries a copy.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from megarl.config.errors import ConfigError
from megarl.config.schema.roles import ModelSource
from megarl.config.schema.task import SCHEMAS, DataConfig, EnvironmentConfig, FileDataConfig, FunctionDataConfig
from megarl.config.values import to_plain, write_value
from megarl.files import load_json_object

RUN_FILE = "run.json"
"""In a run's directory, that of its model's"""
MODEL_FILE = "megarl.json"
"""The copy in the directory of a model, which may be moved"""
FORMAT = tuple(
    f"data.{name}"
    for name in (
        *("prompt_length", "chat_template", "chat_template_path", "system"),
        *("instruction", "instruction_path", "response_prefix"),
    )
)
"""How a question is put to the policy, whatever the data are"""
OF_ONE_SET = ("data.path", "data.heldout_path", "data.subset", "data.split", "data.heldout_split")
"""Keys that can be right for one set of problems only"""
SAMPLING = ("rollout.response_length", "rollout.stop", "rollout.stop_token_ids", "rollout.dtype")
DTYPES = ("policy.dtype", "critic.dtype", "reference.dtype")
OF_A_CPU = ("rollout.kv_cache_tokens", "rollout.max_running_requests")
"""What a server without a GPU has to be told"""
OF_THE_CRITIC = ("data.critic_prompt", "data.critic_prompt_length")
NAMES_CODE = (
    *("reward.path", "reward.url", "reward.parts"),
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
        found = self.values.get(group)
        return next((name for name, schema in SCHEMAS[group].items() if schema.__name__ == found), None)

    def list_keys(self, group: str) -> list[str]:
        kind = self.find_kind(group)
        return [f"{group}.{field.name}" for field in fields(SCHEMAS[group][kind])] if kind is not None else []

    def build_data(self) -> tuple[DataConfig, EnvironmentConfig] | None:
        """What the run learned from, and in which environment; None where that is not known.

        Raises ConfigError as `check_trust`.
        """
        if not self.knows_data or self.find_kind("environment") is None:
            return None
        self.check_trust(("data.", "environment."))
        built = (
            SCHEMAS[group][str(self.find_kind(group))](
                **{key.partition(".")[2]: self.values[key] for key in self.list_keys(group) if key in self.values}
            )
            for group in ("data", "environment")
        )
        return next(built), next(built)

    def check_trust(self, prefixes: Collection[str], typed: Collection[str] = ()) -> None:
        """Raise ConfigError where a model apart from its run names code, or a server, in the keys below `prefixes`.

        A model may be somebody else's; a run's directory is as trusted as resume= takes it. typed: keys that do not
        count.
        """
        for key in NAMES_CODE if self.file.name == MODEL_FILE else ():
            value = self.values.get(key)
            if self._is_others_code(key, value) and key not in typed and key.startswith(tuple(prefixes)):
                raise ConfigError(
                    [
                        f"{key}: the run that wrote the model had {value!r} ({self.file}); code and servers are taken"
                        f" from the run's directory, not from a model's: type {key.partition('.')[0]}= and its keys"
                    ]
                )

    def _is_others_code(self, key: str, value: Any) -> bool:
        if key == "environment.tools":  # The tools that megarl has are names alone.
            return any(":" in str(each) for each in value or ())
        if key == "data.path" and self.values["data"] != FunctionDataConfig.__name__:  # A file or a dataset.
            return False
        module = str(value or "").partition(":")[0]
        is_megarls = module.startswith("megarl.examples.") and not module.endswith(".py")
        return bool(value) and not is_megarls


def find_run_settings(source: object, path: object) -> RunSettings | None:
    """Those of the run that wrote the model in this directory; None where none did, and for a model of another source.

    source, path: the values of `model`. Raises ConfigError for a file that is not what a run writes.
    """
    is_path = to_plain(source) == ModelSource.path.value and isinstance(path, str)
    if not is_path or not (model := Path(str(path)).expanduser()).is_dir():
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


def choose_kinds(settings: RunSettings, composed: DictConfig, typed: Mapping[str, str]) -> dict[str, str]:
    """The options of groups that the run's model brings: those that nobody has typed.

    composed: what was typed. typed: the groups that it sets, with their options, and its dotted keys. Raises
    ConfigError for a model apart from its run that asks for code or a server.
    """
    kinds: dict[str, str] = {}
    if settings.knows_data:
        from_files = {schema.__name__ for schema in SCHEMAS["data"].values() if issubclass(schema, FileDataConfig)}
        wanted = {
            "data": "data" not in typed,
            "environment": "environment" not in typed,
            # The reward of generated problems scores no others.
            "reward": "reward" not in typed
            and ("data" not in typed or {_name_type(composed, "data"), settings.values["data"]} <= from_files),
        }
        kinds = {group: kind for group in wanted if wanted[group] and (kind := settings.find_kind(group))}
    settings.check_trust({f"{group}." for group in kinds}, typed)
    if kinds.get("environment") and _name_type(composed, "environment") == settings.values["environment"]:
        del kinds["environment"]
    is_cpu = settings.values.get("cluster.gpus_per_node") == 0
    if is_cpu and not any(key.split(".")[0] == "cluster" for key in typed):
        kinds["cluster"] = "laptop"
    return kinds


def _name_type(composed: DictConfig, group: str) -> str:
    return getattr(OmegaConf.get_type(composed, group), "__name__", "")


def choose_values(
    settings: RunSettings, composed: DictConfig, typed: Mapping[str, str], kinds: Mapping[str, str], command: str
) -> dict[str, Any]:
    """The values that the run's model brings, by dotted key: those that are different and that nobody has typed.

    composed: what was typed, with `kinds`.
    """
    keys = ["seed", *SAMPLING, *DTYPES]
    is_own = "data" in kinds or _names_same_data(settings, composed, typed)
    if settings.knows_data:
        keys += settings.list_keys("data") if is_own else FORMAT
        keys += settings.list_keys("reward") if "reward" in kinds else []
        is_same_kind = _name_type(composed, "environment") == settings.values.get("environment")
        keys += settings.list_keys("environment") if is_same_kind and "environment" not in typed else []
    if settings.values.get("cluster.gpus_per_node") == composed.cluster.gpus_per_node == 0:
        keys += OF_A_CPU
    is_other = "data" in kinds and any(key in typed for key in OF_ONE_SET)
    left_out = {*OF_THE_CRITIC, *(OF_ONE_SET if is_other else ())}
    chosen = {
        key: settings.values[key]
        for key in dict.fromkeys(keys)
        if key in settings.values and key not in left_out and not _is_set(key, typed)
    }
    if command == "evaluate" and "evaluate.paths" not in {key[: len("evaluate.paths")] for key in typed}:
        if HELDOUT not in typed and is_own and _asks_the_same(settings, composed, chosen):
            chosen[HELDOUT] = True
        is_heldout = chosen.get(HELDOUT) or read_plain(composed, HELDOUT)
        if is_heldout and NUM_HELDOUT_USED in settings.values and NUM_HELDOUT_USED not in typed:
            chosen[NUM_HELDOUT_USED] = settings.values[NUM_HELDOUT_USED]
    return {key: value for key, value in chosen.items() if read_plain(composed, key) != value}


def _is_set(key: str, typed: Collection[str]) -> bool:
    return any(f"{key}.".startswith(f"{other}.") or other.startswith(f"{key}.") for other in typed if "." in other) or (
        key in typed
    )


def _names_same_data(settings: RunSettings, composed: DictConfig, typed: Mapping[str, str]) -> bool:
    """Whether the typed data are the run's; a set with a preset of its own, such as gsm8k, is always whole."""
    kind, chosen = settings.find_kind("data"), typed.get("data")
    if chosen is not None and kind == "function" and _name_type(composed, "data") == FunctionDataConfig.__name__:
        chosen = kind  # data=addition is data=function with a path.
    if not settings.knows_data or chosen != kind:
        return False
    return all(
        _is_same(read_plain(composed, key), settings.values.get(key))
        for key in settings.list_keys("data")
        if key == "data.path" or (key in OF_ONE_SET and key in typed)
    )


def _asks_the_same(settings: RunSettings, composed: DictConfig, chosen: Mapping[str, Any]) -> bool:
    """Whether the run's data are split as they were."""
    own = [key for key in settings.list_keys("data") if key not in (*FORMAT, *OF_THE_CRITIC)]
    return all(_is_same(chosen.get(key, read_plain(composed, key)), settings.values.get(key)) for key in ("seed", *own))


def _is_same(one: Any, other: Any) -> bool:
    if one == other or not (isinstance(one, str) and isinstance(other, str)):
        return bool(one == other)
    return Path(one).expanduser().absolute() == Path(other).expanduser().absolute()


def read_plain(composed: DictConfig, key: str) -> Any:
    """The value of a dotted key as run.json has it; None where it is not set."""
    found = OmegaConf.select(composed, key, throw_on_missing=False)
    return to_plain(OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found)


def describe_brought(path: str, settings: RunSettings, overrides: Collection[str]) -> str:
    """The line that says what was taken from where."""
    # A prompt's text may have several lines.
    shown = " ".join(overrides).replace("\n", "\\n")
    return f"model.path: {path} was written by a run; taken from {settings.file}: {shown}"


def write_overrides(kinds: Mapping[str, str], values: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{group}={kind}" for group, kind in kinds.items())
    yield from (f"{key}={write_value(value)}" for key, value in values.items())
