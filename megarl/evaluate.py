"""`python -m megarl.evaluate model=... data=gsm8k,aime24 [key=value] ...`: evaluate a checkpoint on problem sets."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig

from megarl.config.errors import ConfigError
from megarl.config.evaluation_sets import expand_sets, load_configs
from megarl.config.load import complete_overrides
from megarl.config.overrides import check_words, open_overrides
from megarl.config.roll import rewrite_overrides
from megarl.config.schema.roles import ModelSource
from megarl.config.schema.root import Config, register
from megarl.config.search_path import CONF_DIR, take_config_dirs
from megarl.run.command import (
    Results,
    check_directory,
    check_start,
    end_with_config_error,
    end_with_reader,
    is_completion,
    is_printing,
    note_before,
    run_composed,
    split_arguments,
)


def main() -> None:
    """Check the command line, then let Hydra start the evaluation."""
    try:
        arguments = take_config_dirs(sys.argv[1:])
    except ConfigError as error:
        end_with_config_error(error)
    options, overrides = split_arguments(arguments)
    end_with_reader(options)
    configs: dict[str, Config] = {}
    try:
        # Without overrides: options such as --help, which Hydra handles.
        if not is_completion(options) and (overrides or not options):
            configs = prepare(overrides, options)
    except ConfigError as error:
        end_with_config_error(error)

    @hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")
    def run(composed: DictConfig) -> None:
        run_composed(composed, lambda _first, run_dir: evaluate(configs, run_dir), "evaluate")

    run()


def prepare(overrides: Sequence[str], options: Sequence[str]) -> dict[str, Config]:
    """The configuration of each set; puts the first one's overrides into sys.argv for Hydra. Raises ConfigError."""
    if {"-m", "--multirun"} & set(options):
        raise ConfigError(["--multirun: data=a,b is one evaluation of several sets; nothing else is swept"])
    check_words(overrides)
    rewritten = rewrite_overrides(overrides)
    runs = expand_sets(rewritten.overrides)
    configs = load_configs(runs)
    if not is_printing(options):
        check_directory(overrides)
        note_before(overrides)
        check_start(next(iter(configs.values())), "evaluate")
    completed = [complete_overrides(run, "evaluate") for run in runs.values()]
    for line in dict.fromkeys([*rewritten.lines, *(line for _, lines in completed for line in lines)]):
        print(line, flush=True)
    # Hydra creates the run's folder and records the configuration in it.
    sys.argv[1:] = [*options, *choose_run_dir(overrides, configs), *open_overrides(completed[0][0])]
    return configs


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

    results = run_evaluation(configs, run_dir)
    found: dict[str, float] = {}
    for result in results:
        key, estimate = next(iter(result.estimates.items()))
        found |= {f"{result.name}/{key}": float(estimate.value), f"{result.name}/reward": result.mean_reward}
    return found


if __name__ == "__main__":
    register()
    main()
