"""The values of a configuration by dotted key, as run.json records them."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any


def list_values(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, plain value) of every leaf (a dict or list counts as one) and the class name of every group."""
    for field in fields(node):
        value = getattr(node, field.name)
        if is_dataclass(value):
            # The class tells which option of a group it is: two rewards may have the same keys.
            yield f"{prefix}{field.name}", type(value).__name__
            yield from list_values(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", _to_plain(value)


def _to_plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _to_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(each) for each in value]
    return dict(list_values(value)) if is_dataclass(value) else value
