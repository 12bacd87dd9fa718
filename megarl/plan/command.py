"""Whether a job fits its cluster, and what it takes there, before it waits in a queue; needs no GPU and no model files.

    megarl plan algo=vapo model=qwen32b cluster=h100x64 [key=value] ...
    megarl plan --search algo=vapo model=qwen32b cluster=h100x64 [key=value] ...

takes what megarl train takes. "fits, but" says what a job that fits loses, and which change mends it: half of
the GPUs, or hours of training between two checkpoints. The exit code is 0 where the job fits, 1 where it does not, 2
for a configuration that is wrong.

--search             the ten fastest plans on the cluster's GPUs, with the overrides to paste; keys that the command
                     line sets keep their values
--mean-response N    the mean length of responses in tokens, for the seconds; else half of rollout.response_length
"""

import sys
import warnings
from collections.abc import Sequence

from megarl.config.errors import ConfigError
from megarl.config.load import load
from megarl.config.overrides import check_words, take_config_dirs
from megarl.config.placement import list_contradictions
from megarl.config.schema.root import Config
from megarl.config.schema.run import Placement
from megarl.plan.assumptions import LONGEST_SIGNAL_S
from megarl.run.command import EXIT_BAD_CONFIG, end_with_closed_pipe

DOES_NOT_FIT = 1
WIDTH = 128
USAGE = "usage: megarl plan [--search] [--mean-response N] [group=option] [key=value] ..., as megarl train takes them"
SEARCH, MEAN = "--search", "--mean-response"


def main(arguments: Sequence[str]) -> int:
    if any(argument in ("-h", "--help") for argument in arguments):
        print(__doc__)
        return 0
    warnings.simplefilter("ignore")
    try:
        arguments, mean = take_mean(take_config_dirs(arguments))
        searches, arguments = SEARCH in arguments, [argument for argument in arguments if argument != SEARCH]
        options = [argument for argument in arguments if argument.startswith("-")]
        if options:
            raise ConfigError([f"{options[0]}: no such option; {USAGE}"])
        check_words(arguments)
        loaded = load(arguments)
        config = loaded.config
        for line in loaded.lines:
            print(line)
        check_hardware_is_known(config)
        return show_search(arguments, config, mean) if searches else show(config, mean)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return EXIT_BAD_CONFIG


def take_mean(arguments: Sequence[str]) -> tuple[list[str], float | None]:
    """The arguments without --mean-response, and its value in tokens."""
    rest, mean = list[str](), None
    words = iter(arguments)
    for word in words:
        name, _, text = word.partition("=")
        if name != MEAN:
            rest.append(word)
            continue
        text = text or next(words, "")
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError([f"{MEAN}: found {text!r}; it must be a number of tokens, 1 or more"])
        mean = float(text)
    return rest, mean


def check_hardware_is_known(config: Config) -> None:
    if config.has_critic_alone:
        raise ConfigError(
            [
                "train.num_iterations: 0 found with algo.value_pretrain.rollouts; a plan is of policy and servers, and"
                " the critic alone learns: plan it with train.num_iterations above 0"
            ]
        )
    if config.cluster.hardware.gpu is None:
        raise ConfigError(
            [
                "cluster.hardware.gpu: found null; a plan needs a cluster whose GPU is known: cluster=h100x8, h100x16,"
                " h100x64, h100x256 or h200x8, or the numbers under cluster.hardware (docs/one-node.md has an example)"
            ]
        )


def show_search(arguments: Sequence[str], config: Config, mean: float | None) -> int:
    """Print the fastest plans, on-policy and with responses generated ahead; the exit code."""
    from megarl.plan.job import find_models
    from megarl.plan.search import search
    from megarl.plan.tables import list_found

    models = find_models(config)
    found = search(arguments, models, mean)
    if not config.has_servers:
        print("\n".join(list_found("The fastest plans, on saved rollouts", found)))
        return 0 if found else DOES_NOT_FIT
    print("\n".join(list_found("The fastest plans, on-policy", found)))
    ahead = search(arguments, models, mean, staleness=1)
    print("\n".join(list_found("The fastest with rollout.max_staleness=1", ahead)))
    return 0 if found or ahead else DOES_NOT_FIT


def show(config: Config, mean: float | None) -> int:
    """Print the plan and the verdict; the exit code."""
    problems = list_contradictions(config)
    if problems:
        raise ConfigError([*problems, *find_less_shared(config)])
    # Only now: importing torch and Megatron takes seconds that a wrong key need not wait for.
    from rich.console import Console

    from megarl.plan.job import build_plan, find_models
    from megarl.plan.search import describe_idle, find_change
    from megarl.plan.tables import describe_saves, find_signal, list_tables

    models = find_models(config)
    plan = build_plan(config, models, mean)
    console = Console(width=WIDTH, highlight=False)
    for part in list_tables(config, plan):
        console.print(part)
    if not plan.problems:
        signal = find_signal(config, plan.seconds)
        on_slurm = "" if signal is None else f"; on Slurm with sbatch --signal=B:USR1@{min(signal, LONGEST_SIGNAL_S)}"
        losses = [*describe_idle(config, models, plan), *describe_saves(config, plan.seconds)]
        print(f"\nfits{', but' * bool(losses)}: {describe_gpus(config, plan.num_gpus)}{on_slurm}")
        for line in losses:
            print(f"  {line}")
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
    from megarl.plan.job import build_plan, find_models
    from megarl.plan.search import find_change

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
    number = "1 GPU" if used == 1 else f"{used} GPUs"
    return number if used == there else f"{used} of {there} GPUs; the others are idle"


if __name__ == "__main__":
    end_with_closed_pipe()
    sys.exit(main(sys.argv[1:]))
