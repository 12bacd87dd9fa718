"""`python -m megarl.pretrain_value [group=option] [key=value] ...`: train the critic alone, the policy frozen.

The same configuration as `python -m megarl.train`, and the same first steps; the critic is left in RUN_DIR/critic, and
in RUN_DIR/pretrained what algo.value_pretrain.taken_from=RUN_DIR needs to train on from there. The same command with
hydra.run.dir=RUN_DIR resumes one that was not finished (checkpoint.save_every).
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from megarl.checkpoint.manifest import CheckpointError
from megarl.config.errors import ConfigError
from megarl.config.load import CONF_DIR
from megarl.config.schema.root import Config, register
from megarl.run.command import Results, check_command_line, run_composed


def main() -> None:
    """Check every run that the command line describes, then let Hydra start it."""
    check_command_line("pretrain_value")
    _run_composed()


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")
def _run_composed(composed: DictConfig) -> None:
    run_composed(composed, _pretrain, "pretrain_value")


def _pretrain(config: Config, run_dir: Path) -> Results:
    # Only now: importing torch and Ray takes seconds that `--help` need not wait.
    from megarl.value_pretraining.job import run_value_pretraining

    try:
        summary = run_value_pretraining(config, run_dir)
    except CheckpointError as error:
        raise ConfigError([str(error)]) from error
    return {"iterations": summary.num_rollouts, "explained_variance": summary.explained_variance}


if __name__ == "__main__":
    register()
    main()
