"""data=mix: each of its sources as the configuration of a run that had it alone."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.schema import task
from megarl.config.schema.root import Config

OF_RUN = ("chat_template", "chat_template_path", "template_inputs", "critic_prompt", "critic_prompt_length")
"""Keys of data.* that all sources share"""
OWN = ("share", "reward", "reward_scale", "environment", "response_length")
"""Keys of a source besides those of its data"""


@dataclass(frozen=True)
class Source:
    """One source of a mix."""

    share: float | None
    """None: as many prompts as it has problems, which is then so for all sources"""
    reward_scale: float
    config: Config
    """Of a run that had this source alone"""


def list_sources(config: Config) -> dict[str, Source]:
    """The sources by name, in order; empty without data=mix. Raises ConfigError naming the key of the first problem."""
    data = config.data
    if not isinstance(data, task.MixDataConfig):
        return {}
    if not data.sources:
        example = "data.sources.math.kind=gsm8k data.sources.math.reward.kind=math"
        raise ConfigError([f"data.sources: found none; data=mix needs some, as in {example}"])
    found = {str(name): _read_source(config, str(name), given) for name, given in data.sources.items()}
    given = [name for name, source in found.items() if source.share is not None]
    if given and (without := [name for name in found if name not in given]):
        right = "give each source its share, or none of them"
        raise ConfigError([f"data.sources.{without[0]}.share: found none, and {given[0]} has one: {right}"])
    return found


def split_config(config: Config) -> dict[str, Config]:
    """The configuration of each source by its name; without data=mix the run's own under an empty name."""
    return {name: source.config for name, source in list_sources(config).items()} or {"": config}


def has_turns(config: Config) -> bool:
    """Whether an environment answers the policy."""
    return any(isinstance(it.environment, task.MultiTurnEnvironmentConfig) for it in split_config(config).values())


@contextlib.contextmanager
def naming_source(name: str) -> Iterator[None]:
    """What raises ConfigError within says it of this source; "": of the run."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([name_in_source(name, text) for text in error.problems]) from error


def name_in_source(name: str, problem: str) -> str:
    """A problem of data.*, reward.* and so on as that of a source's keys."""
    key = f"data.sources.{name}"
    if not name or problem.startswith(f"{key}."):
        return problem
    named, count = re.subn(r"^(?:data|(reward|environment)|rollout(?=\.response_length))\b", rf"{key}.\1", problem)
    return re.sub(r"\.(?=[.:=])", "", named, count=1) if count else f"{key}: {problem}"


def _read_source(config: Config, name: str, given: Any) -> Source:
    key, mix = f"data.sources.{name}", config.data
    assert isinstance(mix, task.MixDataConfig)
    choices = sorted(set(task.SCHEMAS["data"]) - {"mix"})
    options = {str(k): value for k, value in {**mix.common, **given}.items()} if isinstance(given, Mapping) else {}
    kind = options.pop("kind", None)
    if kind not in choices or not re.fullmatch(r"[A-Za-z][\w-]*", name):
        must = f"a source has a name of letters, digits, _ and -, and {key}.kind is one of {', '.join(choices)}"
        raise ConfigError([f"{key}: found {given!r}; {must}"])
    if of_run := [option for option in options if option in OF_RUN]:
        raise ConfigError([f"{key}.{of_run[0]}: all sources have the same, data.{of_run[0]}: leave it out here"])
    own = {option: options.pop(option) for option in OWN if option in options}
    environment, reward = config.environment, config.reward
    if "environment" in own:
        environment = _read_choice("environment", f"{key}.environment", own["environment"])
    if "reward" in own:
        reward = _read_choice("reward", f"{key}.reward", own["reward"], task.OF_ALL)
        reward = replace(reward, **{option: getattr(config.reward, option) for option in task.OF_ALL})
    shared = {
        each.name: value
        for each in fields(task.DataConfig)
        if (value := getattr(mix, each.name)) != each.default or each.name == "prompt_length"
    }
    if kind == "verifiers" and isinstance(environment, task.VerifiersEnvironmentConfig):
        shared |= {"id": environment.id, "args": environment.args}
    data = task.build_choice("data", kind, shared | options, key, OWN, OF_RUN)
    limits = {"prompt_length": (data.prompt_length, mix.prompt_length, "data.prompt_length")}
    length, most = own.get("response_length"), config.rollout.response_length
    length = most if length is None else length
    limits["response_length"] = (length, most, "rollout.response_length")
    for option, (value, most, of_all) in limits.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ConfigError([f"{key}.{option}: found {value!r}; it must be from 1 to {of_all} ({most})"])
    share, scale = own.get("share"), own.get("reward_scale", 1.0)
    for option, value in (("share", share), ("reward_scale", scale)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if value is not None and not (is_number and (value > 0 or (option == "reward_scale" and value != 0))):
            right = "above 0: a source without a share is left out" if option == "share" else "other than 0"
            raise ConfigError([f"{key}.{option}: found {value!r}; it must be a finite number {right}"])
    rollout = replace(config.rollout, response_length=length)
    return Source(
        share, float(scale), replace(config, data=data, environment=environment, reward=reward, rollout=rollout)
    )


def _read_choice(group: str, key: str, given: Any, without: frozenset[str] = frozenset()) -> Any:
    options = {str(option): value for option, value in given.items()} if isinstance(given, Mapping) else {}
    kind = options.pop("kind", None)
    if kind not in list(task.SCHEMAS[group]):
        raise ConfigError([f"{key}: found {given!r}; {key}.kind is one of {', '.join(task.SCHEMAS[group])}"])
    if of_run := [option for option in options if option in without]:
        raise ConfigError([f"{key}.{of_run[0]}: all sources have the same, {group}.{of_run[0]}: leave it out here"])
    return task.build_choice(group, kind, options, key, ("kind",), without)
