"""`python -m megarl.train [group=option] [key=value] ...`: train with one composed configuration (-m: a sweep)."""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from megarl.command import check_command_line, run_composed
from megarl.config.load import CONF_DIR
from megarl.config.schema import Config, register


def main() -> None:
    """Check every run that the command line describes, then let Hydra start it."""
    check_command_line()
    _run_composed()


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")
def _run_composed(composed: DictConfig) -> None:
    run_composed(composed, _train)


def _train(config: Config, run_dir: Path) -> str:
    # Only now: importing torch and Ray takes seconds that `--help` need not wait.
    from megarl.job import run_job

    summary = run_job(config, run_dir)
    return f"iterations={summary.num_iterations} reward/heldout={summary.heldout_reward:.4f}"


if __name__ == "__main__":
    register()
    main()
