"""What the commands share: they check the command line before anything starts, and end with a line and a code."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from megarl.config.errors import ConfigError
from megarl.config.load import check_overrides, to_config
from megarl.config.open_keys import open_overrides
from megarl.config.placement import check_cluster
from megarl.config.roll.rewrite import rewrite_overrides
from megarl.config.schema.root import Config
from megarl.config.search_path import is_search_path, take_config_dirs
from megarl.run.signals import Stopped, stopping_on_signals

EXIT_BAD_CONFIG = 2
Results = Mapping[str, float]
"""Results of a run, in the order of the line `done: ...`."""


def check_command_line(command: str = "train") -> None:
    """Put our keys into sys.argv in place of ROLL's names, printing each, and check every run that it describes.

    command: the module's name, which decides what a key can do. Ends the process with the problems found.
    """
    try:
        arguments = take_config_dirs(sys.argv[1:])
    except ConfigError as error:
        end_with_config_error(error)
    overrides = [text for text in arguments if text.startswith("~") or (not text.startswith("-") and "=" in text)]
    try:
        rewritten = rewrite_overrides(overrides)
        check_overrides(overrides, command)
    except ConfigError as error:
        end_with_config_error(error)
    for line in rewritten.lines:
        print(line, flush=True)
    # Hydra reads sys.argv itself, so what makes the keys of open fields acceptable to it has to be there too.
    sys.argv[1:] = [*(text for text in arguments if text not in overrides), *open_overrides(rewritten.overrides)]


def run_composed(composed: DictConfig, run: Callable[[Config, Path], Results], command: str = "train") -> Results:
    """Run one composed configuration in its run directory and print `done: ... run_dir=DIR`.

    `run` gives what stands between. A ConfigError ends the process with code 2, a signal with that signal's code.
    """
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    try:
        with stopping_on_signals():
            config = to_config(composed)
            problems = list(check_cluster(config, command))
            if problems:
                raise ConfigError(problems)
            results = run(config, run_dir)
    except ConfigError as error:
        end_with_config_error(error)
    except Stopped as stopped:
        print(f"{stopped}; every process was ended. run_dir={run_dir}", file=sys.stderr)
        sys.exit(stopped.exit_code)
    print(f"done: {format_results(results)} run_dir={run_dir}", flush=True)
    return results


def list_overrides() -> list[str]:
    """The overrides of the run that Hydra has composed, as another process can be given them: where Hydra found files
    (--config-dir) included, its other keys left out.
    """
    given = HydraConfig.get().overrides
    return [*filter(is_search_path, given.hydra), *given.task]


def format_results(results: Results) -> str:
    return " ".join(f"{name}={v}" if isinstance(v, int) else f"{name}={v:.4f}" for name, v in results.items())


def end_with_config_error(error: ConfigError) -> NoReturn:
    for problem in error.problems:
        print(f"error: {problem}", file=sys.stderr)
    sys.exit(EXIT_BAD_CONFIG)
