"""`python -m megarl.train [group=option] [key=value] ...`: train with one composed configuration (-m: a sweep)."""

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from megarl.config.errors import ConfigError
from megarl.config.load import CONF_DIR, check_overrides, to_config
from megarl.config.open_keys import open_overrides
from megarl.config.schema import register
from megarl.signals import Stopped, stopping_on_signals

EXIT_BAD_CONFIG = 2


def main() -> None:
    """Check every run that the command line describes, then let Hydra start it."""
    # Hydra reads sys.argv itself, so what makes the keys of open fields acceptable to it has to be there too.
    sys.argv[1:] = open_overrides(sys.argv[1:])
    overrides = [arg for arg in sys.argv[1:] if arg.startswith("~") or (not arg.startswith("-") and "=" in arg)]
    try:
        check_overrides(overrides)
    except ConfigError as error:
        end_with_config_error(error)
    _run_composed()


def end_with_config_error(error: ConfigError) -> None:
    for problem in error.problems:
        print(f"error: {problem}", file=sys.stderr)
    sys.exit(EXIT_BAD_CONFIG)


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")
def _run_composed(composed: DictConfig) -> None:
    # Only now: importing torch and Ray takes seconds that `--help` need not wait.
    from megarl.job import run_job

    run_dir = Path(HydraConfig.get().runtime.output_dir)
    try:
        with stopping_on_signals():
            summary = run_job(to_config(composed), run_dir)
    except ConfigError as error:
        end_with_config_error(error)
    except Stopped as stopped:
        print(f"{stopped}; every process was ended. run_dir={run_dir}", file=sys.stderr)
        sys.exit(stopped.exit_code)
    print(
        f"done: iterations={summary.num_iterations} reward/heldout={summary.heldout_reward:.4f} run_dir={run_dir}",
        flush=True,
    )


if __name__ == "__main__":
    register()
    main()
