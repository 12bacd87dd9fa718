"""Whether a command can write to the directory that its command line names, found before anything starts."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from megarl.config.errors import ConfigError
from megarl.run.arguments import is_sweep

RUN_KEY, SWEEP_KEY = "hydra.run.dir", "hydra.sweep.dir"
DEFAULT = Path("runs")
"""The parent of what both keys are in conf/config.yaml"""


def check_directory(arguments: Sequence[str]) -> None:
    """Raise ConfigError where the run's or sweep's directory cannot be made or written to, or something in it.

    A name with an interpolation counts up to it.
    """
    problem = next(_find_problems(arguments), None)
    if problem is not None:
        raise ConfigError([problem])


def _find_problems(arguments: Sequence[str]) -> Iterator[str]:
    key = SWEEP_KEY if is_sweep(arguments) else RUN_KEY
    directory = find_directory(arguments, key)
    existing = next(path for path in (directory, *directory.absolute().parents) if os.path.lexists(path))
    found = f"{key}: found {directory}"
    if not existing.is_dir():
        yield f"{found}; {existing} is there and is not a directory"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"{found}; {existing} cannot be written to by user {os.geteuid()}{_explain(existing)}"
    elif existing == directory:
        blocked = [entry.name for entry in sorted(directory.iterdir()) if not _is_writable(entry)]
        if blocked:
            more = f" and {len(blocked) - 3} more" if len(blocked) > 3 else ""
            yield f"{found}, in which user {os.geteuid()} cannot write to {', '.join(blocked[:3])}{more}"


def find_directory(arguments: Sequence[str], key: str) -> Path:
    """The directory of the last override of `key`, without what an interpolation adds, or the default's parent."""
    texts = [text.removeprefix(f"{key}=") for text in arguments if text.startswith(f"{key}=")]
    if not texts:
        return DEFAULT
    try:
        value = OverridesParser.create().parse_override(f"{key}={texts[-1]}").value()
    except HydraException:
        return DEFAULT  # a mistake that Hydra names itself
    fixed, interpolation, _ = str(getattr(value, "text", value)).partition("${")
    return Path(fixed).parent if interpolation and not fixed.endswith("/") else Path(fixed)


def _is_writable(entry: Path) -> bool:
    return entry.is_symlink() or os.access(entry, os.W_OK | (os.X_OK if entry.is_dir() else 0))


def _explain(path: Path) -> str:
    return ": its file system is read-only" if os.statvfs(path).f_flag & os.ST_RDONLY else ""
