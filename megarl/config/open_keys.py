"""Fields that hold another package's options by name, such as `rollout.sglang`: any key may be set in them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_origin, get_type_hints

from megarl.config.schema import data, environment, reward
from megarl.config.schema.root import Config


@cache
def list_open_keys() -> tuple[str, ...]:
    """The dotted keys of the schema whose value is a dictionary, of every kind of data and reward."""
    found = {
        *_find_dicts(Config, ""),
        *(key for schema in data.SCHEMAS.values() for key in _find_dicts(schema, "data.")),
        *(key for schema in environment.SCHEMAS.values() for key in _find_dicts(schema, "environment.")),
        *(key for schema in reward.SCHEMAS.values() for key in _find_dicts(schema, "reward.")),
    }
    return tuple(sorted(found))


def open_overrides(overrides: Sequence[str]) -> list[str]:
    """The same overrides with `++` before those that set something in an open field.

    Hydra takes a new key of a dictionary only with `+`, and one with a value only without; `++` does both.
    """
    pattern = re.compile(rf"(?:{'|'.join(map(re.escape, list_open_keys()))})(?:\.[^=]+)?=")
    return [f"++{text}" if pattern.match(text) else text for text in overrides]


def find_choices_with(key: str) -> list[str]:
    """The choices of a group, such as reward=function, that have this key (reward.path)."""
    group, _, name = key.partition(".")
    groups: dict[str, Mapping[str, Any]] = {
        "data": data.SCHEMAS,
        "environment": environment.SCHEMAS,
        "reward": reward.SCHEMAS,
    }
    kinds = groups.get(group, {}).items()
    return [f"{group}={kind}" for kind, schema in kinds if name in {each.name for each in fields(schema)}]


def _find_dicts(schema: type, prefix: str) -> Iterator[str]:
    types = get_type_hints(schema)
    for field in fields(schema):
        kind = types[field.name]
        if get_origin(kind) is dict:
            yield f"{prefix}{field.name}"
        elif is_dataclass(kind) and isinstance(kind, type):
            yield from _find_dicts(kind, f"{prefix}{field.name}.")
