"""Share of the wall time in which neither the trainer nor the servers work, at rollout.max_staleness 0 and 1.

Run: python tools/bench/overlap.py [--iterations 10] [KEY=VALUE ...]

The tiny job with its real parts (Ray, Megatron-Core, SGLang), one run after the other. The trainer works while it
computes log-probs and values or updates; the servers work while a request for responses is in flight and they are not
paused for new weights. What is left is neither: the weight sync, scoring, and what is done between the steps. Measured
from the second iteration to the last but one, as nothing runs ahead of the last. The ratio is iterations per second at
1 over those at 0: above 1 where trainer and servers have devices of their own; where they share their cores, as on a
laptop, one's work slows the other's down, and only what neither used is won.
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.config.load import load_config
from megarl.report.report import build_report
from megarl.run.inputs import load_inputs
from megarl.run.job import open_components, open_resources
from megarl.trainer import Trainer
from megarl.types import Metrics, Rollout

SIZES = [
    "model=tiny",
    "algo=grpo",
    "train.responses_per_prompt=16",
    "train.eval_every=1000",
    "train.num_eval_prompts=1",
]
GOAL = 1.0

Span = tuple[float, float]


@dataclass
class Clock:
    """When who worked, in seconds of one clock."""

    trainer: list[Span] = field(default_factory=list)
    generating: list[Span] = field(default_factory=list)
    paused: list[Span] = field(default_factory=list)
    iterations: list[Span] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    """Response tokens of each iteration"""


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
        metrics = super().publish(version)
        if version:
            # It is a part of the iteration.
            self.clock.iterations[-1] = (self.clock.iterations[-1][0], time.perf_counter())
        return metrics

    def collect(self, iteration: int) -> tuple[Rollout, Metrics]:
        rollout, metrics = super().collect(iteration)
        self.clock.num_tokens.append(sum(len(sample.response.token_ids) for sample in rollout.samples))
        return rollout, metrics


def note_pauses(client: Any, spans: list[Span]) -> None:
    """From the call that pauses a server to the end of the one that resumes it."""
    pause, resume = client.pause, client.resume
    started: list[float] = []

    def noted_pause(*args: Any, **kwargs: Any) -> None:
        started.append(time.perf_counter())
        pause(*args, **kwargs)

    def noted_resume(*args: Any, **kwargs: Any) -> None:
        resume(*args, **kwargs)
        spans.append((started.pop(), time.perf_counter()))

    client.pause, client.resume = noted_pause, noted_resume


def unite(spans: list[Span]) -> list[Span]:
    """The same time, in spans that do not overlap, in order."""
    united: list[Span] = []
    for start, end in sorted(spans):
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(end, united[-1][1]))
        else:
            united.append((start, end))
    return united


def subtract(spans: list[Span], holes: list[Span]) -> list[Span]:
    """The time of `spans` that is in none of `holes`."""
    left = unite(spans)
    for low, high in holes:
        pieces = [piece for a, b in left for piece in ((a, min(b, low)), (max(a, high), b))]
        left = [(a, b) for a, b in pieces if a < b]
    return left


def measure(spans: list[Span], window: Span) -> float:
    """Share of the window that is in one of the spans."""
    inside = [(max(a, window[0]), min(b, window[1])) for a, b in spans]
    return sum(b - a for a, b in unite([(a, b) for a, b in inside if a < b])) / (window[1] - window[0])


def run_job(staleness: int, num_iterations: int, overrides: list[str], directory: Path) -> Clock:
    keys = [
        f"rollout.max_staleness={staleness}",
        "algo.mismatch.correction=tis",
        f"train.num_iterations={num_iterations}",
        "logger.terminal=false",
    ]
    config = load_config([*SIZES, *keys, *overrides])
    inputs = load_inputs(config)
    with (
        contextlib.closing(build_report(config.logger, directory, num_iterations)) as report,
        open_resources(config, inputs, directory / "logs") as hosts,
        open_components(config, inputs, hosts, directory, report) as components,
    ):
        trainer = NotingTrainer(config, components)
        trainer.clock = clock = Clock()
        note_calls(trainer, "build_experience", clock.trainer)
        note_calls(trainer, "update", clock.trainer)
        note_calls(components.engine, "generate", clock.generating)
        for client in components.engine.clients:  # type: ignore[attr-defined]
            note_pauses(client, clock.paused)
        trainer.run()
    return clock


def describe(staleness: int, clock: Clock) -> float:
    """Prints one run; its iterations per second."""
    window = (clock.iterations[1][0], clock.iterations[-2][1])
    seconds, num = window[1] - window[0], len(clock.iterations) - 2
    servers = subtract(clock.generating, clock.paused)
    idle = 1.0 - measure(clock.trainer + servers, window)
    print(
        f"staleness {staleness}: neither works {idle:.2%} of {seconds:.1f} s; trainer works"
        f" {measure(clock.trainer, window):.1%}, servers {measure(servers, window):.1%}, paused"
        f" {measure(clock.paused, window):.2%}; {num / seconds:.3f} iterations/s,"
        f" {sum(clock.num_tokens[1:-1]) / seconds:.0f} tokens/s",
        flush=True,
    )
    return num / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10, help="of each run, 3 or more")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys of megarl, for both runs")
    args = parser.parse_args()
    if args.iterations < 3:
        parser.error(f"--iterations: found {args.iterations}; it must be 3 or more")
    speeds = {}
    with tempfile.TemporaryDirectory() as scratch:
        for staleness in (0, 1):
            clock = run_job(staleness, args.iterations, args.overrides, Path(scratch) / str(staleness))
            speeds[staleness] = describe(staleness, clock)
    print(f"ratio: {speeds[1] / speeds[0]:.2f} goal: {GOAL:g}")


if __name__ == "__main__":
    main()
