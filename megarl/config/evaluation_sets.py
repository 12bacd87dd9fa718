"""The problem sets of `python -m megarl.evaluate data=a,b`: a configuration for each."""

from collections.abc import Sequence

from megarl.config.brought import OF_ONE_SET
from megarl.config.errors import ConfigError
from megarl.config.load import complete_overrides, find_choices, load_config
from megarl.config.overrides import list_options
from megarl.config.schema.root import Config
from megarl.config.schema.run import check_evaluate

DEFAULT_REWARD = "math"
"""The verifier of a set without one of its own name"""


def expand_sets(overrides: Sequence[str]) -> dict[str, list[str]]:
    """The overrides of each set named by data=a,b,c, by set.

    The reward is the given one, else the verifier with the set's name, else `math`. With experiment=NAME its reward is
    the default, and so are its data; a model that a run wrote brings that run's. Raises ConfigError.
    """
    keys = [text.lstrip("+").split("=", 1)[0] for text in overrides]
    has_experiment = "experiment" in keys
    if has_experiment and "data" not in keys:
        return {find_choices(overrides)["data"]: list(overrides)}
    given = [text.split("=", 1)[1] for text in overrides if text.split("=", 1)[0] == "data"]
    if not given and (kind := _find_brought("data", overrides)):
        # Of data=function the name of the function says which data they are.
        maker = _find_brought("data.path", overrides) if kind == "function" else None
        return {maker.strip("'\"").rpartition(":")[2] if maker else kind: list(overrides)}
    choices = list_options("data", overrides)
    if len(given) != 1 or not given[0]:
        raise ConfigError(
            [
                f"data: found {' '.join(given) or 'nothing'}; name the sets once, data=gsm8k,aime24; {_join(choices)};"
                " model=checkpoint model.path=RUN_DIR/policy, which a run wrote, brings that run's"
            ]
        )
    names = [name.strip() for name in given[0].split(",")]
    problems = [f"data: found {name!r}; {_join(choices)}" for name in names if name not in choices]
    problems += [f"data: {name} is named twice" for name in sorted(set(names)) if names.count(name) > 1]
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
            *(
                []
                if "reward" in keys or has_experiment or _find_brought("reward", [f"data={name}", *shared])
                else [f"reward={name if name in rewards else DEFAULT_REWARD}"]
            ),
            *shared,
        ]
        for name in names
    }


def _find_brought(group: str, overrides: Sequence[str]) -> str | None:
    """The option of a group that a model which a run wrote brings along; None for any other model."""
    if not any(text.startswith("model.path=") for text in overrides):
        return None
    added = complete_overrides(overrides, "evaluate")[0][: -len(overrides)]
    return next((text.partition("=")[2] for text in added if text.startswith(f"{group}=")), None)


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
    if evaluate.heldout:
        problems += [
            f"evaluate.heldout: has no effect on evaluate.paths.{name}, a file that takes the set's place"
            for name in evaluate.paths
        ]
    if problems:
        raise ConfigError(problems)
    return configs


def _join(choices: Sequence[str]) -> str:
    return f"the choices are {', '.join(choices)}"
