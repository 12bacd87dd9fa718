"""The values of a configuration by dotted key, as run.json records them, and the chosen kinds of data and reward."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from megarl.config.schema.task import SCHEMAS, TOYS, DataConfig, RewardConfig


def list_values(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, plain value) of every leaf (a dict or list counts as one) and the class name of every group."""
    for field in fields(node):
        value = getattr(node, field.name)
        if is_dataclass(value):
            # The class tells which option of a group it is: two rewards may have the same keys.
            yield f"{prefix}{field.name}", type(value).__name__
            yield from list_values(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", to_plain(value)


def to_plain(value: Any) -> Any:
    """The value without classes of its own: an enum's value, a group's values by dotted key."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(each) for each in value]
    return dict(list_values(value)) if is_dataclass(value) else value


def write_value(value: Any) -> str:
    """A value as an override writes it, which Hydra reads back as the same."""
    value = to_plain(value)
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{write_value(each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(write_value, value))}]"
    if not isinstance(value, str):
        return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    if re.fullmatch(r"(?!(null|true|false|yes|no|on|off|nan|inf)$)[a-z/][\w./-]*", value, re.IGNORECASE | re.ASCII):
        return value
    # A backslash escapes only before a quote and at the end; one before an interpolation keeps it a text.
    text = re.sub(r"(\\+)(?='|$)", r"\1\1", value.replace("${", "\\${")).replace("'", "\\'")
    return f"'{text}'"


def name_data(config: DataConfig) -> str:
    """`data=jsonl data.path=train.jsonl`, `data=addition`."""
    path = getattr(config, "path", None) or ""
    return f"data={path.removeprefix(TOYS)}" if path.startswith(TOYS) else _name("data", config)


def name_reward(config: RewardConfig) -> str:
    """`reward=function reward.path=my_reward.py:score`."""
    return _name("reward", config)


def _name(group: str, config: object) -> str:
    kind = next((name for name, schema in SCHEMAS[group].items() if schema is type(config)), "...")
    path = getattr(config, "path", None)
    return f"{group}={kind}{f' {group}.path={path}' if path else ''}"
