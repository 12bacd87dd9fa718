"""The words of a command line, before Hydra sees them: those that it could not read, the keys that they set, and
fields that hold another package's options by name, such as `rollout.sglang`, in which any key may be set.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser

from megarl.config.errors import ConfigError
from megarl.config.schema.root import Config
from megarl.config.schema.task import SCHEMAS
from megarl.config.search_path import CONF_DIR, list_config_dirs, list_options

NULLS = ("", "null")


def check_words(overrides: Sequence[str]) -> None:
    """Raises ConfigError for a word that is not `key=value`, and for a group that is set to null.

    A group has no null: what is left out has the option that conf/config.yaml names.
    """
    problems = [problem for text in overrides for problem in _find_problem(text, overrides)]
    if problems:
        raise ConfigError(problems)


def _find_problem(text: str, overrides: Sequence[str]) -> Iterator[str]:
    word = text.strip()
    key, equals, value = word.lstrip("+").partition("=")
    if not word:
        yield "found an empty argument; each must be key=value, or group=option"
    elif word.startswith("~"):
        if "=" not in word and not word[1:]:
            yield "~: found without a key"
    elif not equals:
        hint = _suggest(word, overrides)
        yield f"{word}: found without a value; each argument must be key=value, or group=option{hint}"
    elif not key.strip():
        yield f"{word}: found without a key; each argument must be key=value, or group=option"
    elif value.strip().lower() in NULLS and (options := _list_options(key, overrides)):
        leave = "; or leave it out" if key == "experiment" else ""
        yield f"{key}: found {value.strip() or 'nothing'}; the choices are {', '.join(options)}{leave}"


def _suggest(word: str, overrides: Sequence[str]) -> str:
    options = _list_options(word, overrides)
    if options:
        return f": {word}= and one of {', '.join(options)}"
    groups = sorted({path.name for folder in list_config_dirs(()) for path in folder.iterdir() if path.is_dir()})
    fitting = [f"{group}={word}" for group in groups if word in _list_options(group, overrides)]
    return f"; did you mean {' or '.join(fitting)}?" if fitting else ""


def _list_options(group: str, overrides: Sequence[str]) -> list[str]:
    """The options of the group; none where it is no group."""
    # Reading hydra.searchpath of a word that cannot be parsed would raise; only good words are looked at.
    good = [text for text in overrides if "=" in text]
    return list_options(group, good) if (CONF_DIR / group).is_dir() and group.isidentifier() else []


def list_set_keys(override: str) -> list[str]:
    """The dotted keys that an override sets, those of a dictionary one by one; none for an option of a group."""
    key, equals, value = override.lstrip("+").partition("=")
    if not equals or key.startswith(("~", "-", "hydra.")):
        return []
    if value.lstrip().startswith("{"):
        parsed = OverridesParser.create().parse_override(override).value()
        return [f"{key}.{name}" for name in _walk(parsed)] if isinstance(parsed, dict) else []
    return [key] if "." in key or key == "seed" else []


def _walk(tree: dict[Any, Any]) -> Iterator[str]:
    for name, child in tree.items():
        if isinstance(child, dict) and child:
            yield from (f"{getattr(name, 'text', name)}.{rest}" for rest in _walk(child))
        else:
            yield str(getattr(name, "text", name))


@cache
def list_open_keys() -> tuple[str, ...]:
    """The dotted keys of the schema whose value is a dictionary, of every kind of data and reward."""
    found = {
        *_find_dicts(Config, ""),
        *(key for group in SCHEMAS for schema in SCHEMAS[group].values() for key in _find_dicts(schema, f"{group}.")),
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
    kinds = SCHEMAS.get(group, {}).items()
    return [f"{group}={kind}" for kind, schema in kinds if name in {each.name for each in fields(schema)}]


def _find_dicts(schema: type, prefix: str) -> Iterator[str]:
    types = get_type_hints(schema)
    for field in fields(schema):
        kind = types[field.name]
        if get_origin(kind) is dict:
            yield f"{prefix}{field.name}"
        elif is_dataclass(kind) and isinstance(kind, type):
            yield from _find_dicts(kind, f"{prefix}{field.name}.")
