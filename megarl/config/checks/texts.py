"""Keys that hold text: an empty one where it names something, and characters that a name cannot have."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from megarl.config.schema.root import Config

PROSE = ("data.system", "data.instruction", "data.response_prefix", "data.critic_prompt", "reward.rubric")
"""Keys whose text is shown to the model; it may be empty and have lines."""
CHECKED_ELSEWHERE = ("model.path", "model.random.alphabet")
IN_FOLDER_NAMES = ("algo.name", "model.name")
"""Keys that the name of a run's folder is made of"""


def check_texts(config: Config) -> Iterator[str]:
    """One message per text that is empty or has control characters, or that cannot be part of a folder's name."""
    for key, value in _list_texts(config, ""):
        if key in PROSE or key in CHECKED_ELSEWHERE:
            continue
        if not value.strip():
            yield f"{key}: found {value!r}; it must not be empty (null or leaving it out means the default)"
        elif not value.isprintable():
            yield f"{key}: found {value!r}; it must be one line of text"
        elif key in IN_FOLDER_NAMES and not re.fullmatch(r"[\w.+-]+", value):
            yield f"{key}: found {value!r}; it is a part of the run's folder: letters, digits and _ . + - only"


def _list_texts(node: Any, prefix: str) -> Iterator[tuple[str, str]]:
    for field in fields(node):
        value = getattr(node, field.name)
        if is_dataclass(value):
            yield from _list_texts(value, f"{prefix}{field.name}.")
        elif isinstance(value, str):
            yield f"{prefix}{field.name}", value
