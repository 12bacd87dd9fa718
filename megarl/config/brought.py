"""What a model that a run wrote brings along: the run's lengths, dtypes, prompt format, stop tokens, data and reward.

A run's directory records its configuration in run.json, and a model that is taken out of it carries a copy. Recorded
values of a fixed list of keys, and of the groups that nobody typed, are put before what is typed.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from megarl.config.errors import ConfigError
from megarl.config.schema.roles import ModelSource
from megarl.config.schema.task import SCHEMAS, FileDataConfig, FunctionDataConfig
from megarl.config.values import to_plain
from megarl.files import load_json_object

RUN_FILE = "run.json"
"""In a run's directory, that of its model's"""
MODEL_FILE = "megarl.json"
"""The copy in the directory of a model, which may be moved"""
SAMPLING = ("seed", "rollout.response_length", "rollout.stop", "rollout.stop_token_ids", "rollout.dtype")
DTYPES = ("policy.dtype", "critic.dtype", "reference.dtype")
OF_A_CPU = ("rollout.kv_cache_tokens", "rollout.max_running_requests")
"""What a server without a GPU has to be told"""
FORMAT = (
    *("data.prompt_length", "data.chat_template", "data.chat_template_path", "data.system", "data.instruction"),
    "data.response_prefix",
)
"""How a question is put to the policy, whatever the data are"""
OF_ONE_SET = ("data.path", "data.heldout_path", "data.subset", "data.split", "data.heldout_split")
"""Keys that can be right for one set of problems only"""
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
        return next((name for name, schema in SCHEMAS.get(group, {}).items() if schema.__name__ == found), None)

    def list_keys(self, group: str) -> list[str]:
        kind = self.find_kind(group)
        return [] if kind is None else [f"{group}.{field.name}" for field in fields(SCHEMAS[group][kind])]

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
        self, composed: DictConfig, typed: Collection[str], kinds: Collection[str], command: str
    ) -> dict[str, Any]:
        """The values that the model brings, by dotted key. composed: what was typed, with `kinds`."""
        keys = [*SAMPLING, *DTYPES, *(FORMAT if self.knows_data else ())]
        keys += [key for group in kinds for key in self.list_keys(group) if key not in OF_THE_CRITIC]
        if self.values.get("cluster.gpus_per_node") == composed.cluster.gpus_per_node == 0:
            keys += OF_A_CPU
        if any(key in typed for key in OF_ONE_SET):
            keys = [key for key in keys if key not in OF_ONE_SET]
        chosen = {key: self.values[key] for key in keys if key in self.values and not _is_set(key, typed)}
        if command == "evaluate" and not any(key.startswith("evaluate.paths") for key in typed):
            of_split = [key for key in typed if key == "seed" or (key.startswith("data.") and key not in FORMAT)]
            if HELDOUT not in typed and "data" in kinds and not of_split:
                chosen[HELDOUT] = True
            if (chosen.get(HELDOUT) or composed.evaluate.heldout) and NUM_HELDOUT_USED not in typed:
                chosen[NUM_HELDOUT_USED] = self.values.get(NUM_HELDOUT_USED, composed.train.num_eval_prompts)
        return {key: value for key, value in chosen.items() if _read_plain(composed, key) != value}


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


def _is_set(key: str, typed: Collection[str]) -> bool:
    nodes = [other for other in typed if "." in other or other == key]
    return any(f"{key}.".startswith(f"{node}.") or node.startswith(f"{key}.") for node in nodes)


def _read_plain(composed: DictConfig, key: str) -> Any:
    """The value of a dotted key as run.json has it; None where it is not set."""
    found = OmegaConf.select(composed, key, throw_on_missing=False)
    return to_plain(OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found)
