"""The directory that a command line names: whether it can be written to, found before anything starts, and what a
refused start leaves there.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from megarl.config.errors import ConfigError
from megarl.run.arguments import is_sweep
from megarl.run.terminal import DRIVER_LOG

RUN_KEY, SWEEP_KEY = "hydra.run.dir", "hydra.sweep.dir"
DEFAULT = Path("runs")
"""The parent of what both keys are in conf/config.yaml"""
OF_A_START = {
    ".hydra": {"config.yaml", "hydra.yaml", "overrides.yaml"},
    "logs": {DRIVER_LOG},
}
"""What is in the directory of a run before it begins"""


@dataclass(frozen=True)
class Before:
    """What was there before Hydra made the run's directory."""

    directory: Path
    """As `find_directory` gives it, absolute"""
    existing: frozenset[Path]
    """Of it and what is in it"""

    def remove_unused(self, run_dir: Path) -> None:
        """Remove the directory of a run that has not begun, if it was not there before and holds nothing else."""
        if run_dir in self.existing or self.directory not in (run_dir, run_dir.parent):
            return
        folders = [run_dir / name for name in OF_A_START]
        files = [run_dir / folder / name for folder, names in OF_A_START.items() for name in names]
        for path in run_dir.rglob("*"):
            if path.is_symlink() or path not in (folders if path.is_dir() else files):
                return
        for path in files:
            path.unlink(missing_ok=True)
        # Also the parent, where it is new. A directory that is not empty stays.
        for folder in (*folders, run_dir, run_dir.parent):
            if folder not in self.existing and folder.is_relative_to(self.directory):
                with contextlib.suppress(OSError):
                    folder.rmdir()


def look_before(arguments: Sequence[str]) -> Before:
    """Call it before Hydra starts."""
    directory = find_directory(arguments, RUN_KEY).absolute()
    within = directory.iterdir() if directory.is_dir() else ()
    return Before(directory, frozenset([*([directory] if os.path.lexists(directory) else []), *within]))


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
