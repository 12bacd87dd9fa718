"""`megarl evaluate model=... data=gsm8k,aime24 [key=value] ...`: evaluate a checkpoint on problem sets."""

import re
from collections.abc import Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig

from megarl.config.errors import ConfigError
from megarl.config.load import complete_overrides, expand_sets, load_configs
from megarl.config.names import rewrite_overrides
from megarl.config.overrides import CONF_DIR
from megarl.config.schema.roles import ModelSource
from megarl.config.schema.root import Config, register
from megarl.run.command import Results, check_command_line, check_start, is_printing, is_sweep, run_composed


def main() -> None:
    """Check the command line, then let Hydra start the evaluation."""
    configs: dict[str, Config] = {}

    def check(options: Sequence[str], overrides: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
        if options and not overrides:
            return (), ()  # such as --help, which Hydra handles
        if is_sweep(options):
            raise ConfigError(["--multirun: data=a,b is one evaluation of several sets; nothing else is swept"])
        rewritten = rewrite_overrides(overrides)
        runs = expand_sets(rewritten.overrides)
        configs.update(load_configs(runs))
        if not is_printing(options):
            check_start(next(iter(configs.values())), "evaluate")
        completed = [complete_overrides(run, "evaluate") for run in runs.values()]
        # Hydra creates the run's folder and records the configuration of the first set in it.
        lines = [*rewritten.lines, *(line for _, lines in completed for line in lines)]
        return lines, [*choose_run_dir(overrides, configs), *completed[0][0]]

    check_command_line(check)

    @hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")
    def run(composed: DictConfig) -> None:
        run_composed(composed, lambda _first, run_dir: evaluate(configs, run_dir), "evaluate")

    run()


def choose_run_dir(overrides: Sequence[str], configs: dict[str, Config]) -> list[str]:
    """The override of Hydra's run folder, named after the model; none where one is given."""
    if any(text.startswith("hydra.run.dir=") for text in overrides):
        return []
    model = next(iter(configs.values())).model
    name = Path(model.path).name if model.source is ModelSource.path and model.path else model.name
    return [f"hydra.run.dir=runs/${{now:%Y-%m-%d_%H-%M-%S}}_evaluate_{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}"]


def evaluate(configs: dict[str, Config], run_dir: Path) -> Results:
    # Imported here: torch and Ray take seconds, for which `--help` need not wait.
    from megarl.run.evaluation import run_evaluation

    found: dict[str, float] = {}
    for result in run_evaluation(configs, run_dir):
        key, estimate = next(iter(result.estimates.items()))
        found |= {f"{result.name}/{key}": float(estimate.value), f"{result.name}/reward": result.mean_reward}
    return found


if __name__ == "__main__":
    register()
    main()
