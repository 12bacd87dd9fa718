"""`python -m megarl.train [group=option] [key=value] ...`: train with one composed configuration (-m: a sweep).

`python -m megarl.train resume=RUN_DIR [key=value] ...` goes on with a run.
"""

import errno
import os
import sys
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from megarl.checkpoint.manifest import CheckpointError
from megarl.command import check_command_line, end_with_config_error, run_composed
from megarl.config.errors import ConfigError
from megarl.config.load import CONF_DIR
from megarl.config.schema import Config, register
from megarl.resume import check_changes, load_run, save_run, take_resume

FULL = os.strerror(errno.ENOSPC)
"""What the error of a full disk says, also one from a training process"""
_resumed: Path | None = None
"""The run that goes on; set by `main`, since Hydra calls `_run_composed` with nothing but the configuration"""


def main() -> None:
    """Check every run that the command line describes, then let Hydra start it."""
    global _resumed
    try:
        sys.argv[1:], _resumed = take_resume(sys.argv[1:])
    except ConfigError as error:
        end_with_config_error(error)
    check_command_line()
    _run_composed()


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")
def _run_composed(composed: DictConfig) -> None:
    run_composed(composed, _train)


def _train(config: Config, run_dir: Path) -> str:
    # Only now: importing torch and Ray takes seconds that `--help` need not wait.
    from megarl.attempts import run_job

    problems = check_changes(load_run(_resumed)["config"], config) if _resumed else []
    if problems:
        raise ConfigError(problems)
    note_start = partial(save_run, run_dir, config, HydraConfig.get().overrides.task)
    try:
        summary = run_job(config, run_dir, is_new=_resumed is None, note_start=note_start)
    except CheckpointError as error:
        raise ConfigError([str(error)]) from error
    except (OSError, RuntimeError) as error:
        if FULL not in str(error):
            raise
        first = next(line for line in str(error).splitlines() if FULL in line)
        raise ConfigError([f"{first.strip()}; once there is room, resume={run_dir} goes on"]) from error
    return f"iterations={summary.num_iterations} reward/heldout={summary.heldout_reward:.4f}"


if __name__ == "__main__":
    register()
    main()
