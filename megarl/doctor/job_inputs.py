"""What a job reads besides models, checked on its first node before Ray starts: the prompts, and what scores them."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.config.evaluation_sets import expand_sets, load_configs
from megarl.config.load import load_config
from megarl.config.roll.rewrite import rewrite_overrides
from megarl.config.schema.root import Config


def load_job_configs(overrides: Sequence[str], command: str) -> Mapping[str, Config]:
    """The configuration of `python -m megarl.COMMAND`, by its set of problems (evaluate); else one.

    Raises ConfigError.
    """
    if command == "evaluate":
        return load_configs(expand_sets(rewrite_overrides(overrides).overrides))
    return {"": load_config(overrides, command)}


def find_input_problems(configs: Mapping[str, Config]) -> Iterator[str]:
    """Problems with the data and with the reward, read and tried as the run will; no tokenizer is needed for these."""
    for name, config in configs.items():
        if config.rollout.file is not None:
            if not Path(config.rollout.file).expanduser().is_file():
                yield f"rollout.file: {config.rollout.file} is no file"
            continue
        try:
            check_first_problems(config, name)
        except ConfigError as error:
            yield from (f"data={name}: {problem}" if name else problem for problem in error.problems)


def check_first_problems(config: Config, name: str) -> None:
    """Read the data, and score an empty response to the first problem of each split. Raises ConfigError.

    name: of the set in an evaluation, which may have a path of its own.
    """
    # Imported here: these import torch, for which the checks of the other nodes need not wait.
    from megarl.data.build import build_source
    from megarl.data.evaluation_set import use_local_path
    from megarl.reward.scorer import build_scorer
    from megarl.types import Prompt

    data, path = config.data, config.evaluate.paths.get(name)
    if path is not None:
        data = use_local_path(data, path, f"evaluate.paths.{name}")
    splits = build_source(data).load(config.seed)
    prompts = [
        Prompt("first", each.messages[-1].content, (), each.answer, each.metadata, each.messages)
        for each in (*splits.train[:1], *(splits.heldout or ())[:1])
    ]
    with contextlib.closing(build_scorer(config.reward)) as scorer:
        scorer.check(prompts, config.reward.wrong)
