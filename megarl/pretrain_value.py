"""`python -m megarl.pretrain_value [group=option] [key=value] ...`: train the critic alone, the policy frozen.

The same configuration as `python -m megarl.train`, and the same first steps; the critic is left in RUN_DIR/critic.
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from megarl.command import check_command_line, run_composed
from megarl.config.load import CONF_DIR
from megarl.config.schema import Config, register


def main() -> None:
    """Check every run that the command line describes, then let Hydra start it."""
    check_command_line("pretrain_value")
    _run_composed()


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")
def _run_composed(composed: DictConfig) -> None:
    run_composed(composed, _pretrain, "pretrain_value")


def _pretrain(config: Config, run_dir: Path) -> str:
    # Only now: importing torch and Ray takes seconds that `--help` need not wait.
    from megarl.pretraining_job import run_value_pretraining

    summary = run_value_pretraining(config, run_dir)
    return f"iterations={summary.num_rollouts} explained_variance={summary.explained_variance:.4f}"


if __name__ == "__main__":
    register()
    main()
