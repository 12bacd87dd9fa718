"""The words of a command line before Hydra sees them: which keys they set, and where configuration files are found.

Hydra's key for the latter is `hydra.searchpath`, an override like any other: what passes overrides on (the checks
before a run, resume=, the processes of a sweep, Slurm jobs) passes the directories on with them.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from megarl.config.errors import ConfigError
from megarl.config.schema.root import Config
from megarl.config.schema.task import SCHEMAS

CONF_DIR = (Path(__file__).resolve().parents[1] / "conf").resolve()
"""megarl/conf: a link to conf/ in a checkout, a copy of it where megarl is installed."""
OPTIONS = ("--config-dir", "-cd")
KEY = "hydra.searchpath"
_SCHEME = "file://"


def take_config_dirs(arguments: Sequence[str]) -> list[str]:
    """The command line with `--config-dir DIR` (or `-cd DIR`, `--config-dir=DIR`) as one override of hydra.searchpath.

    The option may be given several times. Directories are absolute afterwards: a resumed run may be started elsewhere.
    Raises ConfigError for what is no directory, and where hydra.searchpath is given besides.
    """
    kept: list[str] = []
    directories: list[Path] = []
    words = iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option in OPTIONS:
            directories.append(_check_directory(option, value if equals else next(words, "")))
        else:
            kept.append(word)
    if not directories:
        return [_make_absolute(word) if is_search_path(word) else word for word in kept]
    if any(is_search_path(word) for word in kept):
        raise ConfigError([f"{KEY}: found beside {OPTIONS[0]}, which sets it; give all directories in one of them"])
    return [write_search_path(directories), *kept]


def write_search_path(directories: Sequence[Path | str]) -> str:
    """The override that has Hydra look into these directories, too. Raises ConfigError for what is no directory."""
    paths = [_check_directory("config_dir", str(directory)) for directory in directories]
    return f"{KEY}=[{','.join(_quote(f'{_SCHEME}{path}') for path in paths)}]"


def show_overrides(overrides: Sequence[str]) -> list[str]:
    """The words that a person types for these overrides: `--config-dir DIR` in place of hydra.searchpath."""
    words: list[str] = []
    for text in overrides:
        entries = _read_entries(text) if is_search_path(text) else [""]
        if all(entry.startswith(_SCHEME) for entry in entries):
            words += [word for entry in entries for word in (OPTIONS[0], entry.removeprefix(_SCHEME))]
        else:
            words.append(text)
    return words


def is_search_path(override: str) -> bool:
    return override.lstrip("+").startswith(f"{KEY}=")


def list_config_dirs(overrides: Sequence[str]) -> list[Path]:
    """The directories in which Hydra looks for a file under these overrides, the first that has it first."""
    return [CONF_DIR, *(path for text in overrides if is_search_path(text) for path in _read_search_path(text))]


def list_options(group: str, overrides: Sequence[str] = ()) -> list[str]:
    """The options of a `conf/` group, those in a directory that the overrides add to the search path included."""
    return sorted({file.stem for folder in list_config_dirs(overrides) for file in (folder / group).glob("*.yaml")})


def show_options(entries: Sequence[str]) -> str:
    """`algo: dapo, grpo, ...`, a line for each group, for `--help`: the files, not the schemas that they build on.

    entries: hydra.searchpath.
    """
    overrides = [f"{KEY}=[{','.join(map(_quote, entries))}]"]
    groups = sorted(folder.name for folder in CONF_DIR.iterdir() if folder.is_dir() and folder.name != "hydra")
    return "\n".join(f"{group}: {', '.join(list_options(group, overrides))}" for group in groups)


# conf/config.yaml: hydra.help.template
OmegaConf.register_new_resolver("megarl_options", show_options, replace=True)


def find_hidden_files(overrides: Sequence[str]) -> Iterator[str]:
    """One message for each file of a user's directory that megarl has, too: Hydra would read megarl's."""
    others = [directory for directory in list_config_dirs(overrides) if directory != CONF_DIR]
    for name in (path.relative_to(CONF_DIR) for path in sorted(CONF_DIR.rglob("*.yaml")) if others):
        for directory in others:
            if (directory / name).is_file():
                yield f"{OPTIONS[0]}: {directory / name}: megarl has a {name} too, which would be read; rename yours"


def _read_search_path(override: str) -> list[Path]:
    return [Path(text.removeprefix(_SCHEME)) for text in _read_entries(override) if _is_directory(text)]


def _is_directory(entry: str) -> bool:
    """Not pkg://MODULE, which is Hydra's own affair."""
    return "://" not in entry.removeprefix(_SCHEME)


def _read_entries(override: str) -> list[str]:
    try:
        value = OverridesParser.create().parse_override(override).value()
    except HydraException as error:
        raise ConfigError([f"{KEY}: {str(error).strip().splitlines()[0]}"]) from error
    return [str(getattr(each, "text", each)) for each in (value if isinstance(value, list) else [value])]


def _make_absolute(override: str) -> str:
    """hydra.searchpath with the same entries, directories by their whole path. Raises ConfigError."""
    entries = _read_entries(override)
    directories = {text: _check_directory(KEY, text.removeprefix(_SCHEME)) for text in entries if _is_directory(text)}
    return f"{KEY}=[{','.join(_quote(f'{_SCHEME}{directories[e]}' if e in directories else e) for e in entries)}]"


def _check_directory(option: str, text: str) -> Path:
    path = Path(text).expanduser().resolve()
    if not text or not path.is_dir():
        raise ConfigError(
            [f"{option}: found {text or 'nothing'}; it must be a directory with algo/, model/, data/ ..."]
        )
    return path


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


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
