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
    if "data" not in keys:
        if "experiment" in keys:
            return {find_choices(overrides)["data"]: list(overrides)}
        if kind := _find_brought("data", overrides):
            # Of data=function the name of the function says which data they are.
            maker = _find_brought("data.path", overrides) if kind == "function" else None
            return {maker.strip("'\"").rpartition(":")[2] if maker else kind: list(overrides)}
    choices, rewards = list_options("data", overrides), list_options("reward", overrides)
    names = [name for text in overrides if text.startswith("data=") for name in text[len("data=") :].split(",")]
    if not names or len(set(names)) < len(names) or not set(names) <= set(choices):
        found = f"data: found {','.join(names) or 'nothing'}; name each set once, as in data=gsm8k,aime24"
        own = "model=checkpoint model.path=RUN_DIR/policy, which a run wrote, brings that run's"
        raise ConfigError([f"{found}; the choices are {', '.join(choices)}; {own}"])
    if len(names) > 1 and (of_one := [key for key in keys if key in OF_ONE_SET]):
        right = "evaluate.paths.NAME=FILE gives each its own"
        raise ConfigError([f"{key}: can be right for one set only, found with {len(names)}; {right}" for key in of_one])
    shared = [text for text in overrides if not text.startswith("data=")]
    runs: dict[str, list[str]] = {}
    for name in names:
        runs[name] = [f"data={name}", *shared]
        if not {"reward", "experiment"} & set(keys) and not _find_brought("reward", runs[name]):
            runs[name].insert(1, f"reward={name if name in rewards else DEFAULT_REWARD}")
    return runs


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
    for name in evaluate.paths:
        if name not in runs:
            problems.append(f"evaluate.paths.{name}: no such set; data= names {', '.join(runs)}")
        elif evaluate.heldout:
            problems.append(f"evaluate.heldout: has no effect on evaluate.paths.{name}, which takes the set's place")
    if problems:
        raise ConfigError(problems)
    return configs
