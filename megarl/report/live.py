"""What the live display shows of a run: a few lines of text for a given width, without a terminal."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from megarl.report.text import format_number, format_seconds, make_printable
from megarl.types import Metrics

BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
NUM_REWARDS = 40
NUM_TIMED = 20
"""Iterations whose mean duration the rest is estimated from"""
BAR = 20


@dataclass
class LiveView:
    """The state of the display; `list_lines` renders it."""

    is_unicode: bool = True
    iteration: int | None = None
    """The last that was logged; None: none was"""
    num_iterations: int = 0
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_REWARDS))
    heldout: float | None = None
    warning: str = ""
    describe_processes: Callable[[], str] | None = None
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TIMED + 1))
    """When the last iterations were logged, in seconds of time.monotonic"""

    def log(self, iteration: int, num_iterations: int, metrics: Metrics, now: float) -> None:
        self.iteration, self.num_iterations = iteration, num_iterations
        self.ends.append(now)
        if "reward/mean" in metrics:
            self.rewards.append(metrics["reward/mean"])
        self.heldout = metrics.get("reward/heldout", self.heldout)

    def forget_iterations(self) -> None:
        """The run resumes from a checkpoint: what was shown is of iterations that are repeated."""
        self.rewards.clear()
        self.ends.clear()
        self.iteration = self.heldout = None

    def describe_iteration(self) -> str:
        """ "iteration 3/20", of the one under way; empty before the first and after the last."""
        if self.iteration is None or self.iteration >= self.num_iterations:
            return ""
        return f"iteration {self.iteration + 1}/{self.num_iterations}"

    def estimate_left(self, now: float) -> float | None:
        """Seconds until the last iteration, from the mean of the newest; None before two were logged."""
        if self.iteration is None or len(self.ends) < 2 or self.iteration >= self.num_iterations:
            return None
        each = (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)
        return max(0.0, each * (self.num_iterations - self.iteration) - (now - self.ends[-1]))

    def list_lines(self, phase: str, now: float | None = None) -> Iterator[str]:
        """Progress with the phase; rewards; servers and workers; the last warning. Those that there are."""
        left = self.estimate_left(time.monotonic() if now is None else now)
        if self.iteration is not None and self.num_iterations:
            done = self.iteration / self.num_iterations
            eta = f"  {format_seconds(left)} left" if left is not None else ""
            yield f"{draw_bar(done, BAR, self.is_unicode)} {done:4.0%}{eta}  {phase}".rstrip()
        elif phase:
            yield phase
        if self.rewards:
            held_out = f" | held-out {format_number(self.heldout)}" if self.heldout is not None else ""
            line = draw_sparkline(self.rewards, self.is_unicode)
            yield f"reward {line} {format_number(self.rewards[-1])}{held_out}"
        if self.describe_processes is not None:
            yield self.describe_processes()
        if self.warning:
            yield f"last warning: {make_printable(self.warning)}"


def draw_bar(done: float, width: int, is_unicode: bool) -> str:
    full = round(min(1.0, max(0.0, done)) * width)
    return ("━" * full + "─" * (width - full)) if is_unicode else ("#" * full + "-" * (width - full))


def draw_sparkline(values: Sequence[float], is_unicode: bool = True, width: int = NUM_REWARDS) -> str:
    """One character per value, the lowest and the highest block for the smallest and the largest; equal values are in
    the middle. Of more than `width` values the means of equal parts are shown.
    """
    blocks, values = BLOCKS if is_unicode else ASCII_BLOCKS, list(values)
    if len(values) > width:
        limits = [i * len(values) // width for i in range(width + 1)]
        values = [fmean(values[a:b]) for a, b in pairwise(limits)]
    low, high = min(values), max(values)
    if high == low:
        return blocks[len(blocks) // 2] * len(values)
    return "".join(blocks[round((value - low) / (high - low) * (len(blocks) - 1))] for value in values)
