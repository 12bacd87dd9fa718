"""Whether a job fits its cluster, and what it takes there, before it waits in a queue; needs no GPU and no model files.

    python -m megarl.tools.plan algo=vapo model=qwen32b cluster=h100x64 [key=value] ...

takes what python -m megarl.train takes. The exit code is 0 where the job fits, 1 where it does not, 2 for a
configuration that is wrong.
"""

import sys
import warnings
from collections.abc import Sequence

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.placement import list_contradictions
from megarl.config.roll.rewrite import rewrite_overrides
from megarl.config.schema.cluster import Placement
from megarl.config.schema.root import Config
from megarl.config.search_path import take_config_dirs
from megarl.config.words import check_words
from megarl.run.arguments import end_with_closed_pipe
from megarl.run.command import EXIT_BAD_CONFIG

DOES_NOT_FIT = 1
WIDTH = 128
USAGE = "usage: python -m megarl.tools.plan [group=option] [key=value] ..., as python -m megarl.train takes them"


def main(arguments: Sequence[str]) -> int:
    if any(argument in ("-h", "--help") for argument in arguments):
        print(__doc__)
        return 0
    try:
        arguments = take_config_dirs(arguments)
    except ConfigError as error:
        return show_problems(error)
    options = [argument for argument in arguments if argument.startswith("-")]
    if options:
        return show_problems(ConfigError([f"{options[0]}: no such option; {USAGE}"]))
    warnings.simplefilter("ignore")
    try:
        check_words(arguments)
        for line in rewrite_overrides(arguments).lines:
            print(line)
        return show(load_config(arguments))
    except ConfigError as error:
        return show_problems(error)


def show_problems(error: ConfigError) -> int:
    for problem in error.problems:
        print(f"error: {problem}", file=sys.stderr)
    return EXIT_BAD_CONFIG


def show(config: Config) -> int:
    """Print the plan and the verdict; the exit code."""
    if config.cluster.hardware.gpu is None:
        raise ConfigError(
            [
                "cluster.hardware.gpu: found null; a plan needs a cluster whose GPU is known: cluster=h100x8, h100x64,"
                " h100x256 or h200x8, or the numbers under cluster.hardware"
            ]
        )
    problems = list_contradictions(config)
    if problems:
        raise ConfigError([*problems, *find_less_shared(config)])
    # Only now: importing torch and Megatron takes seconds that a wrong key need not wait for.
    from rich.console import Console

    from megarl.plan.changes import find_change
    from megarl.plan.estimate import build_plan
    from megarl.plan.jobs import find_models
    from megarl.plan.tables import list_tables

    models = find_models(config)
    plan = build_plan(config, models)
    console = Console(width=WIDTH, highlight=False)
    for part in list_tables(config, plan):
        console.print(part)
    if not plan.problems:
        print(f"\nfits: {describe_gpus(config, plan.num_gpus)}")
        return 0
    print("\ndoes not fit:")
    for problem in plan.problems:
        print(f"  {problem.message}")
    change = find_change(config, models, plan)
    if change is None:
        print("nearest change: none of those that were tried makes it fit")
    else:
        print(f"nearest change: {' '.join(change.overrides)}  (then it fits, with {change.plan.num_gpus} GPUs)")
    return DOES_NOT_FIT


def find_less_shared(config: Config) -> list[str]:
    """Of a job whose keys contradict each other in its placement: what makes it fit in another one, where it does not
    fit in this.
    """
    if config.cluster.placement is Placement.apart:
        return []
    from megarl.plan.changes import find_change
    from megarl.plan.estimate import build_plan
    from megarl.plan.jobs import find_models

    models = find_models(config)
    plan = build_plan(config, models)
    change = find_change(config, models, plan) if plan.problems else None
    if change is None:
        return []
    return [
        f"cluster.placement: found {config.cluster.placement.value}, in which the job does not fit either:"
        f" {plan.problems[-1].message}; nearest change: {' '.join(change.overrides)}  (then it fits, with"
        f" {change.plan.num_gpus} GPUs)"
    ]


def describe_gpus(config: Config, used: int) -> str:
    there = config.cluster.num_nodes * config.cluster.gpus_per_node
    return f"{used} GPUs" if used == there else f"{used} of {there} GPUs; the others are idle"


if __name__ == "__main__":
    end_with_closed_pipe()
    sys.exit(main(sys.argv[1:]))
