"""Progress on a terminal (a live display under the lines already printed) or in a log file (lines only).

Every line is also in a log of the run's folder, with date and time, unbroken.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import rich.progress
from rich.console import Console, RenderableType
from rich.text import Text

from megarl.report.text import format_seconds, make_printable, wrap

LOG_NAME = "train.log"
LOG_WIDTH = 80
"""Columns of a line in a log file or pipe"""
WEEK_S = 7 * 24 * 3600.0


class _Display(rich.progress.Progress):
    """The bar of the iterations, with lines around it."""

    def __init__(self, stream: TextIO, list_lines: Callable[[], Iterator[str]]):
        console = Console(file=stream, highlight=False, markup=False, emoji=False)
        columns = rich.progress.BarColumn(20), rich.progress.TaskProgressColumn(), rich.progress.TimeRemainingColumn()
        self._list_lines = list_lines
        super().__init__(*columns, console=console, refresh_per_second=2, transient=True, speed_estimate_period=WEEK_S)
        self.bar = self.add_task("iterations", visible=False)

    def get_renderables(self) -> Iterator[RenderableType]:
        if self.tasks and self.tasks[0].visible:
            yield self.make_tasks_table(self.tasks)
        yield from (Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in self._list_lines())


class Progress:
    """Prints lines; on a terminal, the last ones are live: the bar, `list_lines`."""

    def __init__(self, stream: TextIO | None, log: Path | None = None):
        """stream: None: nothing is shown. log: gets every line, too; made with the first."""
        self._stream, self._log = stream, log
        self._phases: list[tuple[str, float]] = []
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._iteration, self._num_iterations = -1, 0
        self.warning = ""
        """The last one, which stays in view"""
        self.describe_processes: Callable[[], str] | None = None
        """Called twice a second, from another thread"""
        self._lock = threading.Lock()
        self._display: _Display | None = None
        if stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb":
            self._display = _Display(stream, self.list_lines)
            self._display.start()

    def line(self, text: str) -> None:
        """Print `text` and a newline, and flush, its long lines broken. Characters that the stream cannot encode are
        escaped.
        """
        encoded = text.encode(self._encoding, "backslashreplace").decode(self._encoding)
        with self._lock:
            if self._log is not None:
                append_log(self._log, text)
            if self._stream is not None and self._display is None:
                self._stream.write(wrap(encoded, LOG_WIDTH) + "\n")
                self._stream.flush()
        if self._display is not None:
            width = max(LOG_WIDTH // 2, self._display.console.width)
            self._display.console.print(Text(wrap(encoded, width)), soft_wrap=True)

    def show_iteration(self, iteration: int, num_iterations: int) -> None:
        """Show that this iteration was logged, and that the next one begins."""
        self._iteration, self._num_iterations = iteration, num_iterations
        if self._display is not None:
            self._display.update(
                self._display.bar, completed=max(0, iteration), total=num_iterations, visible=iteration >= 0
            )

    def forget_iterations(self) -> None:
        """The run resumes from a checkpoint: what was shown is of iterations that are repeated."""
        self._iteration = -1
        if self._display is not None:
            self._display.reset(self._display.bar, visible=False)

    def enter(self, phase: str) -> None:
        """Begin `phase`; phases may be nested, and the innermost is shown."""
        self._phases.append((phase, time.monotonic()))

    def leave(self) -> None:
        """End the innermost phase."""
        self._phases.pop()

    def close(self) -> None:
        """End the live display; may be called twice."""
        if self._display is not None:
            self._display.stop()

    def describe_phase(self) -> str:
        """The current phase, for example "iteration 3/20  rollout ... 12 s"; empty between phases."""
        # The list may change meanwhile, in another thread.
        for name, start in self._phases[-1:]:
            is_under_way = 0 <= self._iteration < self._num_iterations
            number = f"iteration {self._iteration + 1}/{self._num_iterations}  " if is_under_way else ""
            return f"{number}{name} ... {format_seconds(time.monotonic() - start)}"
        return ""

    def list_lines(self) -> Iterator[str]:
        """Phase; rewards; responses under way; the last warning. Those that there are."""
        if phase := self.describe_phase():
            yield phase
        if self.describe_processes is not None:
            yield self.describe_processes()
        if self.warning:
            yield f"last warning: {make_printable(self.warning)}"


def append_log(path: Path, text: str) -> None:
    """Append the text, each line with date and time. A full disk is left to other writers to report."""
    now = time.strftime("%Y-%m-%d %H:%M:%S ")
    lines = "".join(f"{now}{line}\n" for line in text.split("\n"))
    with contextlib.suppress(OSError), path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(lines)
