"""The parts of reward=weighted: each a kind of reward with its own keys, checked as if it were the only one."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.config.checks.keys import check_node
from megarl.config.errors import ConfigError, find_nearest_key
from megarl.config.schema.root import Config
from megarl.config.schema.task import (
    SCHEMAS,
    EnvironmentRewardConfig,
    FunctionRewardConfig,
    HttpRewardConfig,
    RewardConfig,
    ScalarModelRewardConfig,
    WeightedRewardConfig,
)

OF_ALL = frozenset(field.name for field in fields(RewardConfig))
"""Keys that say something of the sum, not of a part"""
WITHOUT_RANGE = (FunctionRewardConfig, HttpRewardConfig, ScalarModelRewardConfig, EnvironmentRewardConfig)
"""Kinds of reward whose scores may be any number; those of the others are from 0 to 1"""


@dataclass(frozen=True)
class RewardPart:
    """One reward of a weighted sum."""

    name: str
    weight: float
    config: RewardConfig


def read_parts(config: WeightedRewardConfig) -> tuple[RewardPart, ...]:
    """The parts in the order in which they are given. Raises ConfigError naming the full key of each problem."""
    problems: list[str] = []
    parts: list[RewardPart] = []
    if not config.parts:
        problems.append(
            "reward.parts: found none; reward=weighted needs some, as in reward.parts.right.kind=math"
            " reward.parts.right.weight=0.9"
        )
    for name, given in config.parts.items():
        try:
            parts.append(_read_part(str(name), given))
        except ConfigError as error:
            problems += error.problems
    if config.correct_by is not None and config.correct_by not in config.parts:
        names = ", ".join(map(str, config.parts))
        problems.append(f"reward.correct_by: found {config.correct_by!r}; the parts are {names or 'none'}")
    if problems:
        raise ConfigError(problems)
    return tuple(parts)


def check_parts(config: Config) -> Iterator[str]:
    """One message per problem of the parts of a weighted sum; none for another reward."""
    if isinstance(config.reward, WeightedRewardConfig):
        try:
            parts = read_parts(config.reward)
        except ConfigError as error:
            yield from error.problems
        else:
            for part in parts:
                yield from check_node(config, part.config, f"reward.parts.{part.name}")


def find_score_range(config: RewardConfig) -> tuple[float, float] | None:
    """The least and the largest score; None where it may be any number."""
    if config.wrong != 0:
        return 0.0, 1.0  # every other score is refused
    if isinstance(config, WeightedRewardConfig):
        try:
            parts = read_parts(config)
        except ConfigError:
            return None  # reported by check_parts
        if any(find_score_range(part.config) is None for part in parts):
            return None
        return sum(min(part.weight, 0.0) for part in parts), sum(max(part.weight, 0.0) for part in parts)
    return None if isinstance(config, WITHOUT_RANGE) else (0.0, 1.0)


def _read_part(name: str, given: object) -> RewardPart:
    key = f"reward.parts.{name}"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigError([f"{key}: found {name!r}; the name of a part has lower-case letters, digits and _"])
    if not isinstance(given, Mapping):
        raise ConfigError([f"{key}: found {given!r}; a part has keys of its own: {key}.kind=math {key}.weight=0.5"])
    options = {str(option): value for option, value in given.items()}
    kind, weight = options.pop("kind", None), options.pop("weight", 1.0)
    choices = sorted(set(SCHEMAS["reward"]) - {"weighted"})
    if kind not in choices:
        raise ConfigError([f"{key}.kind: found {kind!r}; it must be one of {', '.join(choices)}"])
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight):
        raise ConfigError([f"{key}.weight: found {weight!r}; it must be a finite number"])
    return RewardPart(name, float(weight), _build_config(key, SCHEMAS["reward"][str(kind)], options))


def _build_config(key: str, schema: type[RewardConfig], options: dict[str, Any]) -> RewardConfig:
    known = [field.name for field in fields(schema) if field.name not in OF_ALL]
    problems = []
    for option in options:
        if option in OF_ALL:
            problems.append(f"{key}.{option}: has no effect in a part; reward.{option} is that of the sum")
        elif option not in known:
            nearest = find_nearest_key(option, known)
            hint = f"did you mean {key}.{nearest}?" if nearest else f"it has {', '.join(('kind', 'weight', *known))}"
            problems.append(f"{key}.{option}: no such key; {hint}")
    node = OmegaConf.structured(schema)
    for option, value in options.items() if not problems else ():
        try:
            OmegaConf.update(node, option, value)
        except OmegaConfBaseException as error:
            problems.append(f"{key}.{option}: {str(error).strip().splitlines()[0]}")
    missing = [option for option in known if OmegaConf.is_missing(node, option)]
    problems += [f"{key}.{option}: missing; this kind of reward needs it" for option in missing]
    if problems:
        raise ConfigError(problems)
    config = OmegaConf.to_object(node)
    assert isinstance(config, RewardConfig)
    return config
