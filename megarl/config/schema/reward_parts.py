"""The parts of reward=weighted, each a reward of its own kind with a name and a weight."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.config.errors import ConfigError
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
    """The parts in the order in which they are given. Raises ConfigError naming the full key of the first problem."""
    if not config.parts:
        example = "reward.parts.right.kind=math reward.parts.right.weight=0.9"
        raise ConfigError([f"reward.parts: found none; reward=weighted needs some, as in {example}"])
    if config.correct_by not in (None, *config.parts):
        names = ", ".join(map(str, config.parts))
        raise ConfigError([f"reward.correct_by: found {config.correct_by!r}; the parts are {names}"])
    return tuple(_read_part(str(name), given) for name, given in config.parts.items())


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


def _read_part(name: str, given: Any) -> RewardPart:
    key, choices = f"reward.parts.{name}", sorted(set(SCHEMAS["reward"]) - {"weighted"})
    options = {str(option): value for option, value in given.items()} if isinstance(given, Mapping) else {}
    kind, weight = options.pop("kind", None), options.pop("weight", 1.0)
    if kind not in choices or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        must = f"a part has a name of lower-case letters, digits and _, and {key}.kind is one of {', '.join(choices)}"
        raise ConfigError([f"{key}: found {given!r}; {must}"])
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight):
        raise ConfigError([f"{key}.weight: found {weight!r}; it must be a finite number"])
    if of_sum := [option for option in options if option in OF_ALL]:
        raise ConfigError([f"{key}.{of_sum[0]}: has no effect in a part; reward.{of_sum[0]} is that of the sum"])
    node = OmegaConf.structured(SCHEMAS["reward"][str(kind)])
    known = [str(option) for option in node if option not in OF_ALL]
    try:
        for option, value in options.items():
            OmegaConf.update(node, option, value)
        config = OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        wrong = f"{key}.{getattr(error, 'key', kind)}: {str(error).strip().splitlines()[0]}"
        raise ConfigError([f"{wrong}; kind={kind} has {', '.join(('weight', *known))}"]) from error
    assert isinstance(config, RewardConfig)
    return RewardPart(name, float(weight), config)
