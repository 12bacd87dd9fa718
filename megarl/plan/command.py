"""Whether a job fits its cluster, and what it takes there, before it waits in a queue; needs no GPU and no model files.

    megarl plan algo=vapo model=qwen32b cluster=h100x64 [key=value] ...
    megarl plan --search algo=vapo model=qwen32b cluster=h100x64 [key=value] ...

takes what megarl train takes. The last lines are hours, GPU-hours, disk and the verdict. "fits, but" says what a job
that fits loses: half of the GPUs, or hours of training between two checkpoints. The exit code is 0 where the job fits,
1 where it does not, 2 for a wrong configuration.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence

from megarl.config.errors import ConfigError
from megarl.config.load import load
from megarl.config.overrides import check_words, take_config_dirs
from megarl.config.placement import list_contradictions
from megarl.config.schema.algo import compares_pairs
from megarl.config.schema.root import Config
from megarl.run.command import EXIT_BAD_CONFIG, end_with_closed_pipe, load_complete

DOES_NOT_FIT = 1
WIDTH = 128


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "megarl plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="the ten fastest plans on the cluster's GPUs, with the overrides to paste; keys that the command line sets"
        " keep their values",
    )
    parser.add_argument(
        "--mean-response",
        type=int,
        metavar="N",
        help="the mean length of responses in tokens, for the seconds; else half of rollout.response_length",
    )
    parser.add_argument(
        "--hours",
        type=float,
        metavar="H",
        help="the time limit of a Slurm job, for the number of starts that the run takes",
    )
    warnings.simplefilter("ignore")
    try:
        options, words = parser.parse_known_args(take_config_dirs(arguments))
        if unknown := [word for word in words if word.startswith("-")]:
            raise ConfigError([f"{unknown[0]}: no such option; {parser.format_usage().strip()} [key=value] ..."])
        if options.mean_response is not None and options.mean_response < 1:
            raise ConfigError([f"--mean-response: found {options.mean_response}; it must be 1 token or more"])
        check_words(words)
        loaded = load(words) if options.search else load_complete(words)
        config = loaded.config
        for line in loaded.lines:
            print(line)
        check_hardware_is_known(config)
        if options.search:
            return show_search(words, config, options.mean_response)
        return show(config, options.mean_response, options.hours)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return EXIT_BAD_CONFIG


def check_hardware_is_known(config: Config) -> None:
    if config.has_critic_alone:
        text = "a plan is of policy and servers, and the critic alone learns"
        if compares_pairs(config.algo):
            raise ConfigError([f"algo.value_loss: bradley_terry found; {text}"])
        found = "0 found with algo.value_pretrain.rollouts"
        raise ConfigError([f"train.num_iterations: {found}; {text}: plan it with train.num_iterations above 0"])
    if config.cluster.hardware.gpu is None:
        known = "cluster=h100x8, h100x16, h100x64, h100x256 or h200x8, or the numbers under cluster.hardware"
        text = f"found null; a plan needs a cluster whose GPU is known: {known} (docs/one-node.md has an example)"
        raise ConfigError([f"cluster.hardware.gpu: {text}"])


def show_search(arguments: Sequence[str], config: Config, mean: float | None) -> int:
    """Print the fastest plans, on-policy and with responses generated ahead; the exit code."""
    from megarl.plan.job import find_models, search
    from megarl.plan.tables import list_found

    models, any_fits = find_models(config), False
    titles = ["The fastest plans, on-policy", "The fastest with rollout.max_staleness=1"]
    for staleness, title in enumerate(titles if config.has_servers else ["The fastest plans, on saved rollouts"]):
        found = search(arguments, models, mean, staleness)
        print("\n".join(list_found(title, found)))
        any_fits |= bool(found)
    return 0 if any_fits else DOES_NOT_FIT


def show(config: Config, mean: float | None, hours: float | None) -> int:
    """Print the plan and the verdict; the exit code."""
    if problems := list_contradictions(config):
        raise ConfigError(problems)
    # Only now: importing torch and Megatron takes seconds that a wrong key need not wait for.
    from rich.console import Console

    from megarl.plan.job import build_plan, find_change, find_models
    from megarl.plan.tables import LONGEST_SIGNAL_S, describe_losses, describe_total, find_signal, list_tables

    models = find_models(config)
    plan = build_plan(config, models, mean)
    console = Console(width=WIDTH, highlight=False)
    for part in list_tables(config, plan):
        console.print(part)
    if not plan.problems:
        print("\n" + "\n".join(describe_total(config, plan, hours)))
        losses, signal = list(describe_losses(config, plan)), find_signal(config, plan.seconds)
        there = config.cluster.num_nodes * config.cluster.gpus_per_node
        gpus = f"{plan.num_gpus}{'' if plan.num_gpus == there else f' of {there}'} GPU{'s' * (there > 1)}"
        then = "then a checkpoint is written" if signal != LONGEST_SIGNAL_S else "sbatch takes no longer signal"
        why = f" (an update takes {plan.seconds.update:,.0f} s, {then})"
        on_slurm = "" if signal is None else f"; on Slurm with sbatch --signal=B:USR1@{signal}{why}"
        print(f"fits{', but' * bool(losses)}: {gpus}{on_slurm}")
        for line in losses:
            print(f"  {line}")
        return 0
    print("\ndoes not fit:")
    for problem in plan.problems:
        print(f"  {problem}")
    change = find_change(config, models, plan)
    if change is None:
        print("nearest change: none of those that were tried makes it fit")
    else:
        print(f"nearest change: {' '.join(change.overrides)}  (then it fits, with {change.plan.num_gpus} GPUs)")
    return DOES_NOT_FIT


if __name__ == "__main__":
    end_with_closed_pipe()
    sys.exit(main(sys.argv[1:]))
