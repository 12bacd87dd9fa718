"""Progress on a terminal (a live display under the lines already printed) or in a log file (lines only).

Every line is also in a log of the run's folder, with date and time, unbroken.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from megarl.report.text import format_number, format_seconds, make_printable, wrap
from megarl.types import Metrics

LOG_NAME = "train.log"
LOG_WIDTH = 80
"""Columns of a line in a log file or pipe"""
LOG_REMINDER_S = 60.0
"""In a log file, a long phase is mentioned after this time, and again whenever its duration has doubled."""
BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
NUM_REWARDS = 40
NUM_TIMED = 20
"""Iterations whose mean duration the rest is estimated from"""
BAR = 20


@dataclass
class LiveView:
    """What the live display shows; `list_lines` renders it, without a terminal."""

    is_unicode: bool = True
    iteration: int | None = None
    """The last that was logged; None: none was"""
    num_iterations: int = 0
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_REWARDS))
    heldout: float | None = None
    warning: str = ""
    describe_processes: Callable[[], str] | None = None
    """Called twice a second, from another thread"""
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
            full, eta = (
                round(min(1.0, max(0.0, done)) * BAR),
                f"  {format_seconds(left)} left" if left is not None else "",
            )
            filled, free = "━─" if self.is_unicode else "#-"
            yield f"{filled * full}{free * (BAR - full)} {done:4.0%}{eta}  {phase}".rstrip()
        elif phase:
            yield phase
        if self.rewards:
            held_out = f" | held-out {format_number(self.heldout)}" if self.heldout is not None else ""
            line = draw_sparkline(self.rewards, BLOCKS if self.is_unicode else ASCII_BLOCKS)
            yield f"reward {line} {format_number(self.rewards[-1])}{held_out}"
        if self.describe_processes is not None:
            yield self.describe_processes()
        if self.warning:
            yield f"last warning: {make_printable(self.warning)}"


def draw_sparkline(values: Sequence[float], blocks: str = BLOCKS) -> str:
    """One character per value, the lowest and the highest block for the smallest and the largest; equal values are in
    the middle.
    """
    low, high = min(values), max(values)
    if high == low:
        return blocks[len(blocks) // 2] * len(values)
    return "".join(blocks[round((value - low) / (high - low) * (len(blocks) - 1))] for value in values)


class Progress:
    """Prints lines, and shows the current phase.

    On a terminal the last lines are live: those of `view`. In a file nothing is ever rewritten: a phase is mentioned
    only when it takes longer than LOG_REMINDER_S.
    """

    def __init__(self, stream: TextIO | None, reminder_s: float = LOG_REMINDER_S, log: Path | None = None):
        """stream: None: nothing is shown. log: gets every line, too; made with the first."""
        self._stream, self._log = stream, log
        self._reminder_s = reminder_s
        self._phases: list[tuple[str, float]] = []
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self.view = LiveView(is_unicode=self._encoding.lower().startswith("utf"))
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._live: Live | None = None
        self._reminder: threading.Thread | None = None
        if stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb":
            console = Console(file=stream, highlight=False, markup=False, emoji=False)
            self._live = Live(get_renderable=self._render, console=console, refresh_per_second=2, transient=True)
            self._live.start()
        elif stream is not None:
            self._reminder = threading.Thread(target=self._remind, name="progress-reminder", daemon=True)
            self._reminder.start()

    def line(self, text: str, *, breaks_words: bool = False) -> None:
        """Print `text` and a newline, and flush. Characters that the stream cannot encode are escaped.

        Lines that are too long are broken. breaks_words: as of `wrap`.
        """
        encoded = text.encode(self._encoding, "backslashreplace").decode(self._encoding)
        with self._lock:
            if self._log is not None:
                append_log(self._log, text)
            if self._stream is not None and self._live is None:
                self._stream.write(wrap(encoded, LOG_WIDTH, breaks_words=breaks_words) + "\n")
                self._stream.flush()
        if self._live is not None:
            width = max(LOG_WIDTH // 2, self._live.console.width)
            self._live.console.print(Text(wrap(encoded, width, breaks_words=breaks_words)), soft_wrap=True)

    def show_iteration(self, iteration: int, num_iterations: int, metrics: Metrics) -> None:
        """Show that this iteration was logged, and that the next one begins."""
        self.view.log(iteration, num_iterations, metrics, time.monotonic())

    def enter(self, phase: str) -> None:
        """Begin `phase`; phases may be nested, and the innermost is shown."""
        self._phases.append((phase, time.monotonic()))
        if self._live is not None:
            self._live.refresh()

    def leave(self) -> None:
        """End the innermost phase."""
        self._phases.pop()
        if self._live is not None:
            self._live.refresh()

    def close(self) -> None:
        """End the live display; may be called twice."""
        self._closed.set()
        if self._live is not None:
            self._live.stop()
        if self._reminder is not None:
            self._reminder.join(timeout=5)

    def describe_phase(self) -> str:
        """The current phase, for example "iteration 3/20  rollout ... 12 s"; empty between phases."""
        # The list may change meanwhile, in another thread.
        for name, start in self._phases[-1:]:
            return f"{self.view.describe_iteration()}  {name} ... {format_seconds(time.monotonic() - start)}".strip()
        return ""

    def _render(self) -> Group:
        lines = self.view.list_lines(self.describe_phase() or self.view.describe_iteration())
        return Group(*(Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in lines))

    def _remind(self) -> None:
        reminded: tuple[str, float] | None = None
        due = self._reminder_s
        while not self._closed.wait(min(1.0, self._reminder_s / 4)):
            for phase in self._phases[-1:]:
                if phase != reminded:
                    reminded, due = phase, self._reminder_s
                if time.monotonic() - phase[1] >= due:
                    due *= 2
                    self.line(self.describe_phase())


def append_log(path: Path, text: str) -> None:
    """Append the text, each line with date and time. A full disk is left to other writers to report."""
    now = time.strftime("%Y-%m-%d %H:%M:%S ")
    lines = "".join(f"{now}{line}\n" for line in text.split("\n"))
    with contextlib.suppress(OSError), path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(lines)
