"""How long a run still takes, and how its held-out reward went."""

import time
from collections.abc import Iterator, Sequence

from megarl.report.text import format_number, format_seconds
from megarl.types import Metrics


class Pace:
    """Says once, after the first iteration, how long the others take."""

    def __init__(self, num_iterations: int, max_minutes: float | None = None):
        """max_minutes: train.max_minutes, which counts from here; None: no limit."""
        self._num_iterations, self._max_minutes = num_iterations, max_minutes
        self._started: float | None = time.monotonic()

    def check(self, iteration: int, metrics: Metrics) -> Iterator[str]:
        """metrics: of the iteration, perf/time_per_step among them where it has responses."""
        seconds, num_left = metrics.get("perf/time_per_step"), self._num_iterations - iteration
        if self._started is None or seconds is None:
            return
        passed, self._started = time.monotonic() - self._started, None
        if num_left > 0:
            left_s = None if self._max_minutes is None else 60 * self._max_minutes - passed
            yield format_pace(seconds, num_left, left_s)


def format_pace(seconds: float, num_left: int, left_s: float | None = None) -> str:
    """`pace: 34 s an iteration; the other 11 take about 6 min 14 s`, and how many of them there is time for.

    seconds: of an iteration. left_s: until the limit of time; the iteration in which it is passed is the last.
    """
    text = f"pace: {format_seconds(seconds)} an iteration; the other {num_left} take about"
    text += f" {format_seconds(num_left * seconds)}"
    num_allowed = num_left if left_s is None else 1 + int(max(0.0, left_s) / seconds)
    if num_allowed < num_left:
        text += f"; train.max_minutes leaves time for about {num_allowed} of them"
    return text


def format_heldout(rewards: Sequence[tuple[int, float]]) -> str:
    """`held-out reward: 0.0143 before training, 0.273 after iteration 17; best 0.28 after iteration 12`.

    rewards: of the evaluations (iteration, reward), in order; one at least.
    """

    def show(point: tuple[int, float]) -> str:
        return f"{format_number(point[1])} {'before training' if point[0] == 0 else f'after iteration {point[0]}'}"

    first, last, best = rewards[0], rewards[-1], max(rewards, key=lambda point: point[1])
    shown = [show(first), show(last)] if len(rewards) > 1 else [show(first)]
    return f"held-out reward: {', '.join(shown)}" + (f"; best {show(best)}" if best not in (first, last) else "")
