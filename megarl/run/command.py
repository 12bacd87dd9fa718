"""What the commands share: the check of the command line before anything starts, the last line, the exit code."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import isnan
from pathlib import Path
from typing import NoReturn

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from megarl.config.errors import ConfigError
from megarl.config.load import check_overrides, list_left_out, load, to_config
from megarl.config.open_keys import open_overrides
from megarl.config.placement import check_cluster
from megarl.config.roll import rewrite_overrides
from megarl.config.schema.root import Config
from megarl.config.search_path import is_search_path, take_config_dirs
from megarl.config.words import check_words
from megarl.report.sinks import check_sinks
from megarl.run.arguments import end_with_reader, is_completion, is_printing, is_sweep, split_arguments
from megarl.run.directory import Before, check_directory, look_before
from megarl.run.machine import check_machine
from megarl.run.signals import Stopped, stopping_on_signals
from megarl.run.terminal import DRIVER_LOG, capturing_output

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
