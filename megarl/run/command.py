"""A command from its line to its exit code: Hydra's options, the run's directory, checks, the last line."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from megarl.config.errors import ConfigError
from megarl.config.load import check_overrides, list_left_out, load, to_config
from megarl.config.overrides import check_words, open_overrides
from megarl.config.placement import check_cluster
from megarl.config.roll import rewrite_overrides
from megarl.config.schema.root import Config
from megarl.config.search_path import is_search_path, take_config_dirs
from megarl.report.sinks import check_sinks
from megarl.run.machine import check_machine
from megarl.run.process import DRIVER_LOG, Stopped, capturing_output, stopping_on_signals

VALUED = ("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--experimental-rerun")
"""Hydra's options that take the next word"""
INFO = ("--info", "-i")
INFO_CHOICES = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
COMPLETION = ("--shell-completion", "-sc")
PRINTING = (*COMPLETION, *INFO, "--help", "-h", "--hydra-help", "--version", "--cfg", "-c")
"""Options that print something and run nothing"""


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(Hydra's options with their values, all other words). A word of the latter may be no override."""
    options: list[str] = []
    words: list[str] = []
    before = ""
    for text in arguments:
        is_value = before in VALUED or (before in INFO and text in INFO_CHOICES)
        before = "" if is_value else text
        (options if is_value or text.startswith("-") else words).append(text)
    return options, words


def is_completion(options: Sequence[str]) -> bool:
    """Whether the words are for Hydra's shell completion (`-sc install=bash`), and no overrides."""
    return any(text in COMPLETION for text in options)


def is_printing(options: Sequence[str]) -> bool:
    """Whether Hydra only prints something and runs nothing."""
    return any(text.split("=", 1)[0] in PRINTING for text in options)


def is_sweep(arguments: Sequence[str]) -> bool:
    return any(text in ("-m", "--multirun") for text in arguments)


def end_with_reader(options: Sequence[str]) -> None:
    """Where these options only print something, end silently once nobody reads it, as in `--help | head`."""
    if is_printing(options):
        end_with_closed_pipe()


def end_with_closed_pipe() -> None:
    """Let a write to a pipe that nobody reads end this process without a message, as other commands do.

    Not for a process that has others to end.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


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


EXIT_BAD_CONFIG = 2
Results = Mapping[str, float]
"""A run's results by name, in the order of the line `done: ...`"""
_before: Before | None = None
"""Set by `note_before`, since Hydra makes the run's directory before it calls what runs"""


def check_command_line(command: str = "train") -> None:
    """Replace ROLL's names in sys.argv by our keys, add what a run's model brings, print both, and check every run.

    command: the module's name, which determines the keys that have an effect. Where there are problems it prints
    them and ends the process.
    """
    try:
        arguments = take_config_dirs(sys.argv[1:])
    except ConfigError as error:
        end_with_config_error(error)
    options, overrides = split_arguments(arguments)
    end_with_reader(options)
    if is_completion(options):
        return
    try:
        check_words(overrides)
        check_overrides(overrides, command)
        if is_sweep(options):
            # A run of it is a command of its own, to which its own model brings settings.
            rewritten = rewrite_overrides(overrides)
            completed, lines = rewritten.overrides, rewritten.lines
        else:
            loaded = load(overrides, command)
            completed, lines = loaded.overrides, loaded.lines
        if not is_printing(options):
            check_directory(arguments)
            note_before(arguments)
            if not is_sweep(options):
                check_start(loaded.config, command)
                lines.extend(list_left_out(overrides, loaded.config))
    except ConfigError as error:
        end_with_config_error(error)
    for line in lines:
        print(line, flush=True)
    # Hydra reads sys.argv itself, so it must also contain what makes the keys of open fields acceptable to Hydra.
    sys.argv[1:] = [*options, *open_overrides(completed)]


def note_before(arguments: Sequence[str]) -> None:
    """Have `run_composed` remove the directory of a run that is refused, where it is not there now."""
    global _before
    _before = look_before(arguments)


def check_start(config: Config, command: str) -> None:
    """Raises ConfigError for what the cluster of the configuration or this machine cannot fulfil.

    A run of a sweep is a command of its own, where it starts.
    """
    problems = list(check_cluster(config, command)) or list(check_machine(config, command))
    problems += check_sinks(config.logger) if command != "evaluate" else ()
    if problems:
        raise ConfigError(problems)


def run_composed(composed: DictConfig, run: Callable[[Config, Path], Results], command: str = "train") -> Results:
    """Run one composed configuration in its run directory and print `done: ... run_dir=DIR`.

    run: returns the results in that line. A ConfigError ends the process with code 2, a signal with its own code.
    """
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    try:
        with stopping_on_signals():
            config = to_config(composed)
            problems = list(check_cluster(config, command))
            if problems:
                raise ConfigError(problems)
            with _capturing(config, run_dir):
                results = run(config, run_dir)
    except ConfigError as error:
        if _before is not None:
            _before.remove_unused(run_dir)
        end_with_config_error(error)
    except Stopped as stopped:
        print(f"{stopped}; every process was ended. run_dir={run_dir}", file=sys.stderr)
        sys.exit(stopped.exit_code)
    print(f"done: {format_results(results)} run_dir={run_dir}", flush=True)
    return results


def _capturing(config: Config, run_dir: Path) -> AbstractContextManager[None]:
    return capturing_output(run_dir / "logs" / DRIVER_LOG) if config.logger.capture_output else nullcontext()


def list_overrides() -> list[str]:
    """The overrides of the run that Hydra has composed, as another process can be given them: where Hydra found files
    (--config-dir) included, its other keys left out.
    """
    given = HydraConfig.get().overrides
    return [*filter(is_search_path, given.hydra), *given.task]


def format_results(results: Results) -> str:
    """`iterations=80 reward/heldout=0.9812`; none stands for what was not measured (NaN)."""

    def show(value: float) -> str:
        return str(value) if isinstance(value, int) else "none" if isnan(value) else f"{value:.4f}"

    return " ".join(f"{name}={show(value)}" for name, value in results.items())


def end_with_config_error(error: ConfigError) -> NoReturn:
    for problem in error.problems:
        print(f"error: {problem}", file=sys.stderr)
    sys.exit(EXIT_BAD_CONFIG)
