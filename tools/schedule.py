"""How long servers and trainer wait for each other, by rollout.max_staleness and number of servers; needs no GPU.

    python -m megarl.tools.schedule algo=grpo model=qwen3_8b cluster=h100x64 cluster.placement=split ... [key=value]

takes what python -m megarl.tools.plan takes, for a cluster whose GPU is known and a job whose servers have GPUs of
their own. Seconds of a token, of training and of a sync are the plan's; megarl/plan/schedule.py simulates the schedule.

--servers 1 2 4      numbers of servers, in place of rollout.num_servers
--staleness 0 1 2 4  values of rollout.max_staleness
--rollouts FILE      a run's rollouts.jsonl (logger.save_rollouts), whose lengths of responses are taken; else those of
                     the reference solutions of GSM8K, of which the longest has 4 times the mean, with the plan's mean
"""

import argparse
import random
import sys
import warnings
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.placement import take_turns
from megarl.config.schema.root import Config
from megarl.plan.estimate import build_plan
from megarl.plan.generation import compute_step
from megarl.plan.jobs import find_models
from megarl.plan.layouts import count_quickly
from megarl.plan.schedule import Durations, Idle, Setting, find_idle, simulate
from megarl.rollout.rollout_file import read_rollouts
from megarl.run.arguments import end_with_closed_pipe
from megarl.run.command import EXIT_BAD_CONFIG

NUM_ITERATIONS = 24
QUANTILES = (
    *(0.285, 0.337, 0.372, 0.403, 0.428, 0.449, 0.470, 0.490, 0.511, 0.525, 0.543, 0.563, 0.577, 0.595, 0.609, 0.626),
    *(0.640, 0.657, 0.675, 0.689, 0.706, 0.723, 0.737, 0.755, 0.772, 0.790, 0.803, 0.817, 0.831, 0.849, 0.866, 0.883),
    *(0.904, 0.925, 0.943, 0.963, 0.981, 1.002, 1.023, 1.040, 1.064, 1.089, 1.113, 1.134, 1.162, 1.186, 1.210, 1.238),
    *(1.270, 1.301, 1.332, 1.367, 1.405, 1.450, 1.496, 1.541, 1.593, 1.666, 1.739, 1.823, 1.920, 2.052, 2.254, 4.271),
)
"""Lengths of the 7,473 reference solutions of GSM8K's training set, in characters, over their mean of 287: the middles
of 63 equal parts, and the longest"""


def choose_lengths(rollouts: Path | None, mean: float, limit: int) -> list[float]:
    """Tokens of responses, in a random order that is always the same. Raises ConfigError for a file without any."""
    lengths = [min(float(limit), max(1.0, mean * share)) for share in QUANTILES for _ in range(64)]
    if rollouts is not None:
        try:
            lengths = [float(len(s.response)) for rollout in read_rollouts(rollouts) for s in rollout.samples]
        except (OSError, ValueError) as error:
            raise ConfigError([f"--rollouts: {error}"]) from error
        if not lengths:
            raise ConfigError([f"--rollouts: {rollouts} has no responses"])
    random.Random(0).shuffle(lengths)
    return lengths


def find_schedule(config: Config, lengths: list[float], staleness: int) -> Idle:
    """The simulated schedule of a job with config.rollout.num_servers servers."""
    plan = build_plan(config, find_models(config), count=count_quickly)
    server, job, rollout = plan.server, plan.jobs["policy"], config.rollout
    if server is None or take_turns(config):
        raise ConfigError(
            [
                "cluster.placement: found servers that share their GPUs with the roles, or none; a schedule needs"
                " servers with GPUs of their own (cluster.placement=split or apart)"
            ]
        )
    if any(problem.where == "servers" for problem in plan.problems):
        raise ConfigError([problem.message for problem in plan.problems])
    mean = sum(lengths) / len(lengths)
    room = int(server.kv_tokens / (config.data.prompt_length + mean))
    setting = Setting(
        num_iterations=NUM_ITERATIONS,
        num_prompts=config.train.num_prompts,
        num_responses=config.train.responses_per_prompt,
        max_staleness=staleness,
        num_servers=rollout.num_servers,
        num_places=max(1, min(rollout.max_running_requests, room)),
    )
    context = config.data.prompt_length + mean / 2
    steps = [compute_step(config, job, server, max(1, number), context) for number in range(setting.num_places + 1)]
    durations = Durations([plan.seconds.training], sync=plan.seconds.sync)
    timeline = simulate(setting, lengths, lambda running, _training: 1 / steps[running], durations)
    return find_idle(timeline, setting.num_places * setting.num_servers)


def show(overrides: list[str], servers: list[int] | None, staleness: list[int], rollouts: Path | None) -> None:
    config = load_config(overrides)
    if config.cluster.hardware.gpu is None:
        raise ConfigError(["cluster.hardware.gpu: found null; a schedule needs a cluster whose GPU is known (h100x64)"])
    plan = build_plan(config, find_models(config), count=count_quickly)
    lengths = choose_lengths(rollouts, plan.mean_response, config.rollout.response_length)
    print(
        f"{config.algo.name} on {config.model.name}: {config.train.num_samples:,} responses an iteration, of"
        f" {sum(lengths) / len(lengths):,.0f} tokens on average and {max(lengths):,.0f} at most; training"
        f" {plan.seconds.training:,.0f} s, sync {plan.seconds.sync:.1f} s"
    )
    columns = ("servers", "max_staleness", "servers idle", "places idle", "training idle", "iteration, s")
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        column.justify = "right"
    for number in servers or [config.rollout.num_servers]:
        own = load_config([*overrides, f"rollout.num_servers={number}"])
        for each in staleness:
            idle = find_schedule(own, lengths, each)
            shares = [f"{share:.0%}" for share in (idle.servers, idle.places, idle.trainer)]
            table.add_row(str(number), str(each), *shares, f"{idle.iteration_s:,.0f}")
    Console(width=100, highlight=False).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="+")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--rollouts", type=Path)
    args, overrides = parser.parse_known_args()
    warnings.simplefilter("ignore")
    try:
        if min(args.servers or [1]) < 1 or min(args.staleness) < 0:
            raise ConfigError(["--servers, --staleness: found a number below 1 or below 0; there are none such"])
        show(overrides, args.servers, args.staleness, args.rollouts)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    return 0


if __name__ == "__main__":
    end_with_closed_pipe()
    sys.exit(main())
