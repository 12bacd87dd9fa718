"""megarl from Python: compose a configuration, run a training. docs/cli.md shows it.

The functions of megarl/algo/ are used as they are: they take tensors and an `AlgoConfig`, and keep nothing.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.checks import check_config
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.overrides import write_search_path
from megarl.config.schema.root import Config
from megarl.run.command import check_start, load_complete

if TYPE_CHECKING:
    from megarl.trainer import Summary


def compose(*overrides: str, config_dir: str | Path | Sequence[str | Path] = ()) -> Config:
    """The checked configuration of `python -m megarl.train OVERRIDES`: `compose("algo=grpo", "seed=2")`.

    config_dir: directories with configuration files of your own, as `--config-dir` adds them. The result is plain
    dataclasses, whose fields may be set. A model that a run wrote brings that run's settings. Needs no torch. Raises
    ConfigError, naming each key, what was found and what would be right.
    """
    return load_config(_add_search_path(overrides, config_dir))


def train(
    config: Config | Sequence[str] = (),
    run_dir: str | Path | None = None,
    *,
    config_dir: str | Path | Sequence[str | Path] = (),
) -> "Summary":
    """Train: processes are started, and ended before this returns. Everything is written to `run_dir`, the trained
    policy to `run_dir`/policy; a run that is there already is resumed from its newest checkpoint.

    config: overrides, as `python -m megarl.train` takes them (["algo=grpo", "seed=2"]; config_dir as for `compose`), or
    what `compose` gives. run_dir: None takes runs/TIME_ALGORITHM_MODEL, as the command does.

    Returns the number of iterations and the last held-out reward (0 to 1; NaN with rollout.file). Raises ConfigError
    for a configuration that contradicts itself, the machine or the run in `run_dir`, CheckpointError for a file that is
    damaged or not of this model, and Stopped, after a checkpoint, for an interrupt (Ctrl-C, a notebook's stop), where
    it is called from the main thread.
    """
    overrides: list[str] = []
    if not isinstance(config, Config):
        if isinstance(config, str):
            raise ConfigError([f"train: found the text {config!r}; a list of overrides is needed: [{config!r}]"])
        overrides = _add_search_path(config, config_dir)
        loaded = load_complete(overrides)
        config, overrides = loaded.config, loaded.overrides
        for line in loaded.lines:
            print(line, flush=True)
    if problems := check_config(config):
        raise ConfigError(problems)
    check_start(config)
    directory = Path(run_dir or f"runs/{time.strftime('%Y-%m-%d_%H-%M-%S')}_{config.algo.name}_{config.model.name}")
    # Only now: importing torch and Ray takes seconds that `compose` need not wait.
    from megarl.run.job import run_job
    from megarl.signals import stopping_on_signals

    with stopping_on_signals():
        return run_job(config, directory.expanduser().resolve(), overrides)


def _add_search_path(overrides: Sequence[str], config_dir: str | Path | Sequence[str | Path]) -> list[str]:
    directories = [config_dir] if isinstance(config_dir, str | Path) else list(config_dir)
    return [*([write_search_path(directories)] if directories else []), *overrides]
