"""Where configuration files are found: megarl's own, and those in the directories of `--config-dir DIR`.

Hydra's key for the latter is `hydra.searchpath`, an override like any other: what passes overrides on (the checks
before a run, resume=, the processes of a sweep, Slurm jobs) passes the directories on with them.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from megarl.config.errors import ConfigError

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
