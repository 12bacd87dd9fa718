"""How busy servers and trainer are at rollout.max_staleness 0, 1 and 2, with responses whose lengths vary by 20 times.

Run: python tools/bench/overlap.py [--iterations 10] [--staleness 0 1 2] [KEY=VALUE ...]

The tiny model with its real parts (Ray, Megatron-Core, SGLang), one run after the other. Each response has a length
that its name decides, as often between 32 and 64 tokens as between 320 and 640; the policy's own end-of-sequence tokens
do not end it. The trainer is busy while it computes log-probs or updates; the servers are busy while a request is in
flight and they are not paused for new weights. Of their places (rollout.num_servers * rollout.max_running_requests)
those are filled that have a request in flight, while the servers are not paused. Measured from the second iteration to
the last but two, since nothing is begun that a run does not need. The ratio is the share of the time in which the
servers are busy at the largest staleness. Where trainer and servers share their cores, as on a laptop, one's work slows
the other's down.
"""

import argparse
import contextlib
import random
import tempfile
import time
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.config.load import load_config
from megarl.interfaces import TurnRequest
from megarl.plan.schedule import Span, Timeline, measure, measure_filled, subtract
from megarl.report.report import build_report
from megarl.rollout.client import SGLangClient
from megarl.run.inputs import load_inputs
from megarl.run.job import open_components, open_resources
from megarl.trainer import Trainer
from megarl.types import Metrics, Response, Rollout

SIZES = [
    "model=tiny",
    "algo=grpo",
    "algo.mismatch.correction=tis",
    "model.random.max_length=1024",
    "rollout.response_length=640",
    "rollout.max_running_requests=32",
    "train.prompts_per_iteration=16",
    "train.responses_per_prompt=8",
    "train.eval_every=1000",
    "train.num_eval_prompts=1",
    "logger.terminal=false",
    "checkpoint.save_every=null",
]
SPREAD = 20
"""The longest response, of rollout.response_length tokens, has so many times the tokens of the shortest one."""
GOAL = 0.95


@dataclass
class Clock(Timeline):
    """When who worked, in seconds of one clock; requests: those that are learned from."""

    num_places: int = 0
    """Requests that all servers run at once"""
    answers: list[tuple[int, int]] = field(default_factory=list)
    """Of each request: the server's number, tokens; 0 tokens where it was broken off"""
    collected: list[float] = field(default_factory=list)
    """When an iteration's rollout was complete"""
    published: list[Span] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)
    """Of each iteration"""
    metrics: list[Metrics] = field(default_factory=list)
    """The rollout's metrics of each iteration"""


@contextlib.contextmanager
def noting(spans: list[Span]) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        spans.append((start, time.perf_counter()))


def note_calls(owner: Any, name: str, spans: list[Span]) -> None:
    """Every call of this method of this object becomes a span."""
    method: Callable[..., Any] = getattr(owner, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        with noting(spans):
            return method(*args, **kwargs)

    setattr(owner, name, noted)


class NotingTrainer(Trainer):
    clock: Clock

    def train(self, iteration: int) -> None:
        with noting(self.clock.iterations):
            super().train(iteration)

    def publish(self, version: int) -> Metrics:
        with noting(self.clock.published):
            metrics = super().publish(version)
        if version:
            # It is a part of the iteration.
            self.clock.iterations[-1] = (self.clock.iterations[-1][0], time.perf_counter())
        return metrics

    def collect(self, iteration: int) -> tuple[Rollout, Metrics]:
        rollout, metrics = super().collect(iteration)
        self.clock.collected.append(time.perf_counter())
        self.clock.rollouts.append(rollout)
        self.clock.metrics.append(metrics)
        return rollout, metrics


def note_requests(engine: Any, clock: Clock) -> None:
    """Each request, evaluations aside, from when it is sent to when its response is there."""
    generate = engine.generate_turns

    async def noted(requests: Sequence[TurnRequest], take: Callable[[int, Response], None]) -> None:
        start, left = time.perf_counter(), set(range(len(requests)))

        def note(index: int, num_tokens: int) -> None:
            left.discard(index)
            if not requests[index].urgent:
                clock.requests.append((start, time.perf_counter()))
                clock.answers.append((requests[index].server, num_tokens))

        def take_noting(index: int, response: Response) -> None:
            note(index, len(response))
            take(index, response)

        try:
            await generate(requests, take_noting)
        finally:
            for index in list(left):
                note(index, 0)

    engine.generate_turns = noted


def vary_lengths(engine: Any, longest: int) -> None:
    """Every response ends after a number of tokens that its name decides, log-uniform from longest / SPREAD on."""
    build = engine._build_params

    def build_with_length(request: TurnRequest) -> dict[str, Any]:
        share = SPREAD ** -random.Random(request.name).random()
        params: dict[str, Any] = build(request)
        return params | {"max_new_tokens": max(1, round(longest * share)), "ignore_eos": True}

    engine._build_params = build_with_length


@contextlib.contextmanager
def noting_pauses(spans: list[Span]) -> Iterator[None]:
    """Within the block, each pause of a server: from the call that pauses it to the end of the one that resumes it."""
    pause, resume = SGLangClient.pause, SGLangClient.resume
    started: dict[str, float] = {}

    def noted_pause(client: SGLangClient, *args: Any, **kwargs: Any) -> None:
        started[client.url] = time.perf_counter()
        pause(client, *args, **kwargs)

    def noted_resume(client: SGLangClient, *args: Any, **kwargs: Any) -> None:
        resume(client, *args, **kwargs)
        if client.url in started:
            spans.append((started.pop(client.url), time.perf_counter()))

    with (
        unittest.mock.patch.object(SGLangClient, "pause", noted_pause),
        unittest.mock.patch.object(SGLangClient, "resume", noted_resume),
    ):
        yield


def run_job(staleness: int, num_iterations: int, overrides: list[str], directory: Path) -> Clock:
    keys = [f"rollout.max_staleness={staleness}", f"train.num_iterations={num_iterations}"]
    config = load_config([*SIZES, *keys, *overrides])
    inputs = load_inputs(config)
    with (
        contextlib.closing(build_report(config.logger, directory, num_iterations)) as report,
        open_resources(config, inputs, directory / "logs") as hosts,
        open_components(config, inputs, hosts, directory, report) as components,
    ):
        assert components.engine is not None
        trainer = NotingTrainer(config, components)
        trainer.clock = clock = Clock()
        clock.num_places = components.engine.num_slots
        note_calls(trainer, "build_experience", clock.trainer)
        note_calls(trainer, "update", clock.trainer)
        note_requests(components.engine, clock)
        vary_lengths(components.engine, config.rollout.response_length)
        with noting_pauses(clock.paused):
            trainer.run()
    return clock


def describe(staleness: int, clock: Clock) -> float:
    """Prints one run; the share of the time in which its servers are busy."""
    window = clock.window
    seconds, kept = window[1] - window[0], slice(1, -2)
    busy = measure(subtract(clock.requests, clock.paused), window)
    tokens = [len(sample.response) for rollout in clock.rollouts[kept] for sample in rollout.samples]
    metrics = clock.metrics[kept]
    oldest = max(line.get("rollout/staleness_max", 0.0) for line in metrics)
    too_stale = sum(line.get("rollout/too_stale_frac", 0.0) for line in metrics) / len(metrics)
    print(
        f"staleness {staleness}: servers busy {busy:.1%} of {seconds:.1f} s, paused"
        f" {measure(clock.paused, window):.1%}, their places filled"
        f" {measure_filled(clock.requests, clock.paused, window, clock.num_places):.0%}; trainer busy"
        f" {measure(clock.trainer, window):.1%}; {len(metrics) / seconds:.3f} iterations/s,"
        f" {sum(tokens) / seconds:.0f} tokens/s; responses of {min(tokens)} to {max(tokens)} tokens; oldest token"
        f" trained on {oldest:g} versions, {too_stale:.2%} of the tokens too stale",
        flush=True,
    )
    return busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10, help="of each run, 4 or more")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys of megarl, for all runs")
    args = parser.parse_args()
    if args.iterations < 4:
        parser.error(f"--iterations: found {args.iterations}; it must be 4 or more")
    busy = {}
    with tempfile.TemporaryDirectory() as scratch:
        for staleness in args.staleness:
            clock = run_job(staleness, args.iterations, args.overrides, Path(scratch) / str(staleness))
            busy[staleness] = describe(staleness, clock)
    print(f"ratio: {busy[max(busy)]:.3f} goal: {GOAL:g}")


if __name__ == "__main__":
    main()
