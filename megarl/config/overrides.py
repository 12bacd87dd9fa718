"""The words of a command line before Hydra sees them: which keys they set, and where configuration files are found; and
the values of a configuration by dotted key, as run.json records them and as words give them.

Hydra's key for the latter is `hydra.searchpath`, an override like any other: what passes overrides on (the checks
before a run, resume=, the processes of a sweep, Slurm jobs) passes the directories on with them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from megarl.config.errors import ConfigError
from megarl.config.schema.root import Config
from megarl.config.schema.task import SCHEMAS, TOY_PROBLEMS, DataConfig, RewardConfig

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
    directories: list[str] = []
    words = iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        if option in OPTIONS:
            directories.append(value if equals else next(words, ""))
        else:
            kept.append(word)
    if directories and any(map(is_search_path, kept)):
        raise ConfigError([f"{KEY}: found beside {OPTIONS[0]}, which sets it; give all directories in one of them"])
    return [write_search_path(directories), *kept] if directories else kept


def write_search_path(directories: Sequence[Path | str]) -> str:
    """The override that has Hydra look into these directories, too. Raises ConfigError for what is no directory."""
    entries = []
    for directory in directories:
        path = Path(directory).expanduser().resolve()
        if not str(directory) or not path.is_dir():
            must = "it must be a directory with algo/, model/, data/ ..."
            raise ConfigError([f"{OPTIONS[0]}: found {str(directory) or 'nothing'}; {must}"])
        entries.append(f"{_SCHEME}{path}")
    return f"{KEY}={write_value(entries)}"


def is_search_path(override: str) -> bool:
    return override.lstrip("+").startswith(f"{KEY}=")


def list_config_dirs(overrides: Sequence[str]) -> list[Path]:
    """The directories in which Hydra looks for a file, the first that has it first; not those of pkg://MODULE."""
    values = [parse_override(text).value() for text in overrides if is_search_path(text)]
    entries = [each for value in values for each in (value if isinstance(value, list) else [value])]
    names = [str(getattr(each, "text", each)).removeprefix(_SCHEME) for each in entries]
    return [CONF_DIR, *(Path(name) for name in names if "://" not in name)]


def parse_override(text: str) -> Override:
    """Raises ConfigError for what Hydra cannot read."""
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError([f"{text}: {str(error).strip().splitlines()[0]}"]) from error


def list_options(group: str, overrides: Sequence[str] = ()) -> list[str]:
    """The options of a `conf/` group, those in a directory that the overrides add to the search path included."""
    return sorted({file.stem for folder in list_config_dirs(overrides) for file in (folder / group).glob("*.yaml")})


def show_options(entries: Sequence[str]) -> str:
    """`algo: dapo, grpo, ...`, a line for each group, for `--help`. entries: hydra.searchpath."""
    overrides = [f"{KEY}={write_value(list(entries))}"]
    groups = sorted(folder.name for folder in CONF_DIR.iterdir() if folder.is_dir() and folder.name != "hydra")
    return "\n".join(f"{group}: {', '.join(list_options(group, overrides))}" for group in groups)


# conf/config.yaml: hydra.help.template
OmegaConf.register_new_resolver("megarl_options", show_options, replace=True)


def check_words(overrides: Sequence[str]) -> None:
    """Raises ConfigError for a word that is not `key=value`, and for a group that is set to null."""
    problems, good = [], [text for text in overrides if "=" in text]
    for word in map(str.strip, overrides):
        key, equals, value = word.lstrip("+").partition("=")
        options = list_options(key, good) if key.isidentifier() and (CONF_DIR / key).is_dir() else []
        if not (equals and key) and not word.startswith("~"):
            groups = [folder.name for folder in sorted(CONF_DIR.iterdir()) if word in list_options(folder.name, good)]
            hint = f": {word}= and one of {', '.join(options)}" if options else ""
            hint += f"; did you mean {' or '.join(f'{group}={word}' for group in groups)}?" if groups else ""
            must = f"each argument must be key=value, or group=option{hint}"
            problems.append(f"{word or 'an empty word'}: found without a {'key' if equals else 'value'}; {must}")
        elif options and value.strip().lower() in ("", "null"):
            problems.append(f"{key}: found {value.strip() or 'nothing'}; the choices are {', '.join(options)}")
    if problems:
        raise ConfigError(problems)


def list_set_keys(override: str) -> list[str]:
    """The dotted keys that an override sets, those of a dictionary one by one; none for an option of a group."""
    key, equals, value = override.lstrip("+").partition("=")
    if not equals or key.startswith(("~", "-", "hydra.")):
        return []
    if value.lstrip().startswith("{"):
        parsed = parse_override(override).value()
        return [name for name, _ in list_leaves(parsed, f"{key}.")] if isinstance(parsed, dict) else []
    return [key] if "." in key or key == "seed" else []


def list_leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all that the dictionary and those within it have; an empty one is a value."""
    for key, child in tree.items():
        name = f"{prefix}{getattr(key, 'text', key)}"
        yield from list_leaves(child, f"{name}.") if isinstance(child, dict) and child else [(name, child)]


def list_open_keys() -> list[str]:
    """The dotted keys of the schema whose value is a dictionary, of every kind of data and reward."""
    groups = {each.name: {"": each.type} for each in fields(Config)} | SCHEMAS
    kinds = [(group, kind) for group, kinds in groups.items() for kind in kinds.values() if is_dataclass(kind)]
    return sorted({key for group, kind in kinds for key in _list_dictionaries(group, kind)})


def _list_dictionaries(name: str, kind: Any) -> Iterator[str]:
    for each in fields(kind):
        if get_origin(each.type) is dict:
            yield f"{name}.{each.name}"
        elif is_dataclass(each.type):
            yield from _list_dictionaries(f"{name}.{each.name}", each.type)


def open_overrides(overrides: Sequence[str]) -> list[str]:
    """The same with `++` before those that set something in an open field: Hydra takes a new key of a dictionary only
    with `+`, and one with a value only without."""
    pattern = re.compile(rf"(?:{'|'.join(map(re.escape, list_open_keys()))})(?:\.[^=]+)?=")
    return [f"++{text}" if pattern.match(text) else text for text in overrides]


def find_choices_with(key: str) -> list[str]:
    """The choices of a group, such as reward=function, that have this key (reward.path)."""
    group, _, name = key.partition(".")
    kinds = SCHEMAS.get(group, {}).items()
    return [f"{group}={kind}" for kind, schema in kinds if name in {each.name for each in fields(schema)}]


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
    if isinstance(value, Sequence) and not isinstance(value, str):
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


def name_choice(group: str, config: DataConfig | RewardConfig) -> str:
    """`data=jsonl data.path=train.jsonl`, `data=addition`, `reward=function reward.path=my_reward.py:score`."""
    kind = next((name for name, schema in SCHEMAS[group].items() if schema is type(config)), "...")
    path = str(getattr(config, "path", None) or "")
    if path.startswith(TOY_PROBLEMS):
        return f"{group}={path.removeprefix(TOY_PROBLEMS)}"
    return f"{group}={kind}{f' {group}.path={path}' if path else ''}"
