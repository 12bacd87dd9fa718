"""The simulated asynchronous schedule (megarl/plan/schedule.py) against real runs on two cores.

Run: python tools/bench/schedule.py [--iterations 10] [--staleness 0 1 2] [KEY=VALUE ...]

Each run is one of tools/bench/overlap.py: the tiny model with Ray, Megatron-Core and SGLang, and responses whose
lengths vary by 20 times. Measured of it are each request's tokens and seconds, and those of each update and sync. From
these follow the durations of the simulation: a step of a server takes a + b * running responses, and s times as long
while the trainer computes, with as many steps for a response as it has tokens and e more (its prompt, its way there and
back), fitted to the requests; the updates' own seconds; the medians of what lies beside them and of the syncs. Who
waits for whom, and so every idle share, follows from the rules alone. The ratio is 1 less the largest difference: of
idle shares in shares of the time, of an iteration's seconds in shares of the measured ones.
"""

import argparse
import heapq
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megarl.config.load import load_config
from megarl.plan.schedule import Durations, Idle, Setting, Span, find_idle, simulate

sys.path.insert(0, str(Path(__file__).parent))
import overlap

GOAL = 0.9
NUM_STEPS = 40
"""Of the fit, by Gauss and Newton"""
PRIOR = 0.05
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Pace:
    """Tokens a second of each of so many running responses."""

    step: float
    """a, seconds"""
    each: float
    """b, seconds for each running response"""
    slower: float
    """s, while the trainer computes"""
    extra: float
    """e, steps of a response beside those of its tokens"""

    def __call__(self, running: int, is_training: bool) -> float:
        return 1 / ((self.step + self.each * running) * (self.slower if is_training else 1.0))


@dataclass(frozen=True)
class ServerLog:
    """The intervals of a server in which nothing changes, and its requests."""

    seconds: Floats
    """[I]; 0 while it is paused"""
    running: Floats
    """[I]"""
    training: Floats
    """[I] share of the interval in which the trainer computes, 0 or 1"""
    first: NDArray[np.int64]
    """[R] the interval in which a request begins to run"""
    last: NDArray[np.int64]
    """[R] the one after its last"""
    tokens: Floats
    """[R]"""


def build_log(clock: overlap.Clock, server: int, num_places: int) -> ServerLog:
    """First come, first served: a request runs from when one of the places is free."""
    rows = [row for row, (own, tokens) in enumerate(clock.answers) if own == server and tokens]
    rows.sort(key=lambda row: clock.requests[row])
    places = [0.0] * num_places
    spans: list[Span] = []
    for row in rows:
        sent, end = clock.requests[row]
        spans.append((min(end, max(sent, heapq.heappop(places))), end))
        heapq.heappush(places, end)
    cuts = [*spans, *clock.trainer, *clock.paused]
    times = np.unique(np.array([time for span in cuts for time in span]))

    def cover(covering: Sequence[Span]) -> Floats:
        changes = np.zeros(len(times))
        for start, end in covering:
            changes[np.searchsorted(times, start)] += 1
            changes[np.searchsorted(times, end)] -= 1
        return changes.cumsum()[:-1]

    return ServerLog(
        seconds=np.diff(times) * (cover(clock.paused) == 0),
        running=np.maximum(cover(spans), 1.0),
        training=np.minimum(cover(clock.trainer), 1.0),
        first=np.searchsorted(times, [start for start, _ in spans]),
        last=np.searchsorted(times, [end for _, end in spans]),
        tokens=np.array([clock.answers[row][1] for row in rows], dtype=np.float64),
    )


def read_pace(parameters: Floats) -> Pace:
    """All above 0, and the trainer makes no server faster."""
    step, each, slower, extra = (float(value) for value in np.exp(parameters))
    return Pace(step, each, 1 + slower, extra)


def find_misses(parameters: Floats, start: Floats, logs: Sequence[ServerLog]) -> Floats:
    """Of each request: the tokens that it would have by its end, less those it has, over the mean. And, so that what
    the requests do not tell stays near the start, a little of the distance from it.
    """
    pace, misses = read_pace(parameters), [PRIOR * (parameters - start)]
    for log in logs:
        step = (pace.step + pace.each * log.running) * np.where(log.training > 0, pace.slower, 1.0)
        total = np.concatenate([[0.0], (log.seconds / step).cumsum()])
        misses.append((total[log.last] - total[log.first] - log.tokens - pace.extra) / log.tokens.mean())
    return np.concatenate(misses)


def fit_pace(logs: Sequence[ServerLog]) -> Pace:
    """Least squares over the requests."""
    places = sum(float((log.seconds * log.running).sum()) for log in logs)
    step, running = (
        places / sum(float(log.tokens.sum()) for log in logs),
        places / sum(log.seconds.sum() for log in logs),
    )
    # At first half of a step is of the responses that run.
    parameters = start = np.log([step / 2, step / 2 / running, 0.3, 3.0])
    damping, misses = 1e-3, find_misses(parameters, start, logs)
    for _ in range(NUM_STEPS):
        slopes = [(find_misses(parameters + 1e-5 * unit, start, logs) - misses) / 1e-5 for unit in np.eye(4)]
        matrix = np.stack(slopes, axis=1)
        product = matrix.T @ matrix
        change = np.linalg.solve(product + damping * np.diag(np.diag(product)), -matrix.T @ misses)
        tried = find_misses(parameters + np.clip(change, -1, 1), start, logs)
        if float(tried @ tried) < float(misses @ misses):
            parameters, misses, damping = parameters + np.clip(change, -1, 1), tried, damping / 3
        else:
            damping *= 4
    return read_pace(parameters)


def find_durations(clock: overlap.Clock) -> Durations:
    """The trainer has two spans in each iteration, experience and update, which are one in the simulation."""
    pairs = zip(clock.trainer[::2], clock.trainer[1::2], strict=True)
    training = [second[1] - second[0] + first[1] - first[0] for first, second in pairs]
    published = clock.published[-len(training) :]
    host = [
        sync[0] - complete - seconds
        for complete, sync, seconds in zip(clock.collected, published, training, strict=True)
    ]
    return Durations(training, statistics.median(host), statistics.median(end - start for start, end in published))


def simulate_run(clock: overlap.Clock, setting: Setting) -> tuple[Idle, Pace]:
    logs = [build_log(clock, server, setting.num_places) for server in range(setting.num_servers)]
    pace = fit_pace(logs)
    lengths = [len(sample.response) + pace.extra for rollout in clock.rollouts for sample in rollout.samples]
    timeline = simulate(setting, lengths, pace, find_durations(clock))
    return find_idle(timeline, setting.num_places * setting.num_servers), pace


def compare(staleness: int, measured: Idle, simulated: Idle, pace: Pace) -> float:
    """Prints both; the largest difference."""
    names = ("servers idle", "places idle", "trainer idle")
    both = list(zip(astuple(measured), astuple(simulated), strict=True))
    texts = [f"{name} {real:.1%} ({found:.1%})" for name, (real, found) in zip(names, both[:3], strict=True)]
    (real_s, found_s) = both[3]
    print(
        f"staleness {staleness}, measured (simulated): {', '.join(texts)}, an iteration {real_s:.2f} s ({found_s:.2f});"
        f" a step {1e3 * pace.step:.1f} ms + {1e3 * pace.each:.2f} for each response, {pace.slower:.2f} times while the"
        f" trainer computes; {pace.extra:.1f} more steps a response",
        flush=True,
    )
    differences = [abs(float(real - found)) for real, found in both[:3]]
    return max(*differences, abs(float(found_s / real_s) - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10, help="of each run, 5 or more")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys of megarl, for all runs")
    args = parser.parse_args()
    if args.iterations < 5:
        parser.error(f"--iterations: found {args.iterations}; it must be 5 or more")
    config = load_config([*overlap.SIZES, *args.overrides])
    differences = []
    with tempfile.TemporaryDirectory() as scratch:
        for staleness in args.staleness:
            clock = overlap.run_job(staleness, args.iterations, args.overrides, Path(scratch) / str(staleness))
            setting = Setting(
                num_iterations=args.iterations,
                num_prompts=config.train.num_prompts,
                num_responses=config.train.responses_per_prompt,
                max_staleness=staleness,
                num_servers=config.rollout.num_servers,
                num_places=config.rollout.max_running_requests,
                in_waves=staleness == 0,
            )
            measured = find_idle(clock, clock.num_places)
            simulated, pace = simulate_run(clock, setting)
            differences.append(compare(staleness, measured, simulated, pace))
    print(f"ratio: {1 - max(differences):.3f} goal: {GOAL:g}")


if __name__ == "__main__":
    main()
