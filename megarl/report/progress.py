"""Progress on a terminal (a live display under the lines already printed) or in a log file (lines only).

Every line is also in a log of the run's folder, with date and time, unbroken.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from megarl.report.live import LiveView
from megarl.report.text import format_seconds, wrap
from megarl.types import Metrics

LOG_NAME = "train.log"
LOG_WIDTH = 80
"""Columns of a line in a log file or pipe"""
LOG_REMINDER_S = 60.0
"""In a log file, a long phase is mentioned after this time, and again whenever its duration has doubled."""


class Progress:
    """Prints lines, and shows the current phase.

    On a terminal the last lines are live: phase, progress, rewards, processes, the last warning. In a file nothing is
    ever rewritten: a phase is mentioned only when it takes longer than LOG_REMINDER_S.
    """

    def __init__(self, stream: TextIO | None, reminder_s: float = LOG_REMINDER_S, log: Path | None = None):
        """stream: None: nothing is shown. log: gets every line, too; made with the first."""
        self._stream, self._log = stream, log
        self._reminder_s = reminder_s
        self._phases: list[tuple[str, float]] = []
        encoding = getattr(stream, "encoding", None) or "utf-8"
        self._view = LiveView(is_unicode=encoding.lower().startswith("utf"))
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
        with self._lock:
            if self._log is not None:
                append_log(self._log, text)
            if self._stream is not None and self._live is None:
                self._stream.write(self._fit(text, LOG_WIDTH, breaks_words) + "\n")
                self._stream.flush()
        if self._live is not None:
            shown = self._fit(text, max(LOG_WIDTH // 2, self._live.console.width), breaks_words)
            self._live.console.print(Text(shown), soft_wrap=True)

    def show_iteration(self, iteration: int, num_iterations: int, metrics: Metrics) -> None:
        """Show that this iteration was logged, and that the next one begins."""
        self._view.log(iteration, num_iterations, metrics, time.monotonic())

    def forget_iterations(self) -> None:
        """Show a run that resumes from a checkpoint."""
        self._view.forget_iterations()

    def show_processes(self, describe: Callable[[], str]) -> None:
        """Show a line about servers and workers. describe: called twice a second, from another thread."""
        self._view.describe_processes = describe

    def show_warning(self, text: str) -> None:
        """Keep the text in view until the next one."""
        self._view.warning = text

    def enter(self, phase: str) -> None:
        """Begin `phase`; phases may be nested, and the innermost is shown."""
        self._phases.append((phase, time.monotonic()))
        self._redraw()

    def leave(self) -> None:
        """End the innermost phase."""
        self._phases.pop()
        self._redraw()

    def close(self) -> None:
        """End the live display; may be called twice."""
        self._closed.set()
        if self._live is not None:
            self._live.stop()
        if self._reminder is not None:
            self._reminder.join(timeout=5)

    def describe_phase(self) -> str:
        """The current phase, for example "iteration 3/20  rollout ... 12 s"; empty between phases."""
        phases = self._phases[-1:]
        if not phases:
            return ""
        name, start = phases[0]
        return f"{self._view.describe_iteration()}  {name} ... {format_seconds(time.monotonic() - start)}".strip()

    def _fit(self, text: str, width: int, breaks_words: bool) -> str:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        return wrap(text.encode(encoding, "backslashreplace").decode(encoding), width, breaks_words=breaks_words)

    def _redraw(self) -> None:
        if self._live is not None:
            self._live.refresh()

    def _render(self) -> Group:
        lines = self._view.list_lines(self.describe_phase() or self._view.describe_iteration())
        return Group(*(Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in lines))

    def _remind(self) -> None:
        reminded: tuple[str, float] | None = None
        due = self._reminder_s
        while not self._closed.wait(min(1.0, self._reminder_s / 4)):
            phases = self._phases[-1:]
            if not phases:
                continue
            if phases[0] != reminded:
                reminded, due = phases[0], self._reminder_s
            if time.monotonic() - phases[0][1] >= due:
                due *= 2
                self.line(self.describe_phase())


def append_log(path: Path, text: str) -> None:
    """Append the text, each line with date and time. A full disk is left to other writers to report."""
    now = time.strftime("%Y-%m-%d %H:%M:%S ")
    lines = "".join(f"{now}{line}\n" for line in text.split("\n"))
    try:
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(lines)
    except OSError:
        return
