"""`python -m megarl.evaluate model=... data=gsm8k,aime24 [key=value] ...`: evaluate a checkpoint on problem sets."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.open_keys import open_overrides
from megarl.config.roll.rewrite import rewrite_overrides
from megarl.config.schema.evaluate import check_evaluate
from megarl.config.schema.model import ModelSource
from megarl.config.schema.root import Config, register
from megarl.config.search_path import CONF_DIR, list_options, take_config_dirs
from megarl.config.words import check_words
from megarl.run.arguments import end_with_reader, is_completion, is_printing, split_arguments
from megarl.run.command import Results, check_start, end_with_config_error, run_composed
from megarl.run.directory import check_directory

DEFAULT_REWARD = "math"
"""The verifier of a set without one of its own name"""
OF_ONE_SET = ("data.path", "data.heldout_path", "data.subset", "data.split", "data.heldout_split")
"""Keys that can be right for one set only"""


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
        check_start(next(iter(configs.values())), "evaluate")
    for line in rewritten.lines:
        print(line, flush=True)
    # Hydra creates the run's folder and records the configuration in it.
    first = open_overrides(next(iter(runs.values())))
    sys.argv[1:] = [*options, *choose_run_dir(overrides, configs), *first]
    return configs


def expand_sets(overrides: Sequence[str]) -> dict[str, list[str]]:
    """The overrides of each set named by data=a,b,c, by set.

    The reward is the given one, else the verifier with the set's name, else `math`. Raises ConfigError.
    """
    given = [text.split("=", 1)[1] for text in overrides if text.split("=", 1)[0] == "data"]
    choices = list_options("data", overrides)
    if len(given) != 1 or not given[0]:
        raise ConfigError(
            [f"data: found {' '.join(given) or 'nothing'}; name the sets once, data=gsm8k,aime24; {_join(choices)}"]
        )
    names = [name.strip() for name in given[0].split(",")]
    problems = [f"data: found {name!r}; {_join(choices)}" for name in names if name not in choices]
    problems += [f"data: {name} is named twice" for name in sorted(set(names)) if names.count(name) > 1]
    keys = [text.lstrip("+").split("=", 1)[0] for text in overrides]
    if len(names) > 1:
        problems += [
            f"{key}: can be right for one set only, found with {len(names)};"
            " evaluate.paths.NAME=FILE gives each its own"
            for key in keys
            if key in OF_ONE_SET
        ]
    if problems:
        raise ConfigError(problems)
    shared = [text for text in overrides if text.split("=", 1)[0] != "data"]
    rewards = list_options("reward", overrides)
    return {
        name: [
            f"data={name}",
            *([] if "reward" in keys else [f"reward={name if name in rewards else DEFAULT_REWARD}"]),
            *shared,
        ]
        for name in names
    }


def load_configs(runs: dict[str, list[str]]) -> dict[str, Config]:
    """The checked configuration of each set, by set. Raises ConfigError."""
    configs = {name: load_config(overrides, "evaluate") for name, overrides in runs.items()}
    evaluate = next(iter(configs.values())).evaluate
    problems = list(check_evaluate(evaluate))
    problems += [
        f"evaluate.paths.{name}: no such set; data= names {', '.join(runs)}"
        for name in evaluate.paths
        if name not in runs
    ]
    if problems:
        raise ConfigError(problems)
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
    found = [(result.name, *next(iter(result.estimates.items()))) for result in results]
    return {f"{name}/{key}": float(estimate.value) for name, key, estimate in found}


def _join(choices: Sequence[str]) -> str:
    return f"the choices are {', '.join(choices)}"


if __name__ == "__main__":
    register()
    main()
