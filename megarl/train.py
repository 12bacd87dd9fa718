"""`megarl train [group=option] [key=value] ...`: train with one composed configuration (-m: a sweep).

`megarl train resume=RUN_DIR [key=value] ...` resumes a run; `python -m megarl.train` is the same.
"""

import errno
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from megarl.config.errors import ConfigError
from megarl.config.overrides import CONF_DIR, take_config_dirs
from megarl.config.schema.root import Config, register
from megarl.files import CheckpointError
from megarl.report.record import HELDOUT, HELDOUT_LOGPROB, HELDOUT_PAIRS
from megarl.run import command

if TYPE_CHECKING:
    from megarl.trainer import Summary

FULL = os.strerror(errno.ENOSPC)
"""The text of a full disk's error, also of one from a training process"""
_resumed: Path | None = None
"""The resumed run; set by `main`, since Hydra calls `_run_composed` with the configuration alone"""


def main() -> None:
    """Check every run of the command line, then let Hydra start it."""
    global _resumed
    try:
        sys.argv[1:], _resumed = command.take_resume(take_config_dirs(sys.argv[1:]))
    except ConfigError as error:
        command.end_with_config_error(error)
    command.check_command_line(command.check_training)
    if command.is_sweep(sys.argv[1:]):
        from megarl.sweep import run_sweep  # imports torch, for which `--help` need not wait

        sys.exit(run_sweep(_run_composed))
    _run_composed()


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")
def _run_composed(composed: DictConfig) -> float | None:
    """Run; returns the held-out reward, which a sweeper maximises, None for a failed run of a sweep."""
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        from megarl.sweep import run_one

        results = run_one()
    else:
        results = command.run_composed(composed, _train)
    names, found = (HELDOUT, HELDOUT_PAIRS, HELDOUT_LOGPROB), results or {}
    return next((found[name] for name in names if name in found), None)


def _train(config: Config, run_dir: Path) -> command.Results:
    # Imported here: torch and Ray take seconds, for which `--help` need not wait.
    from megarl.run.job import run_job

    try:
        summary = run_job(config, run_dir, command.list_overrides(), is_resumed=_resumed is not None)
    except CheckpointError as error:
        raise ConfigError([str(error)]) from error
    except (OSError, RuntimeError) as error:
        if line := next((line.strip() for line in str(error).splitlines() if FULL in line), None):
            raise ConfigError([f"{line}; once there is space, resume={run_dir} resumes the run"]) from error
        raise
    return summary.results


class _CallableModule(ModuleType):
    """Lets `megarl.train(...)` be a function although `python -m megarl.train` needs a module of this name."""

    def __call__(self, *given: Any, **options: Any) -> "Summary":
        """`megarl.api.train`."""
        from megarl.api import train

        return train(*given, **options)


sys.modules[__name__].__class__ = _CallableModule


if __name__ == "__main__":
    register()
    main()
