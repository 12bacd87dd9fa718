"""Progress on a terminal (a live line under the lines already printed) or in a log file (lines only)."""

import threading
import time
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from megarl.report.text import format_seconds

LOG_REMINDER_S = 60.0
"""In a log file, a long phase is mentioned after this time, and again whenever its duration has doubled."""


class Progress:
    """Prints lines, and shows the current phase.

    On a terminal the phase is a live last line with a running clock. In a file nothing is ever rewritten: a phase is
    mentioned only when it takes longer than LOG_REMINDER_S.
    """

    def __init__(self, stream: TextIO, reminder_s: float = LOG_REMINDER_S):
        self._stream = stream
        self._reminder_s = reminder_s
        self._phases: list[tuple[str, float]] = []
        self._iteration = ""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._live: Live | None = None
        self._reminder: threading.Thread | None = None
        if stream.isatty():
            console = Console(file=stream, highlight=False, markup=False, emoji=False)
            self._live = Live(get_renderable=self._render, console=console, refresh_per_second=2, transient=True)
            self._live.start()
        else:
            self._reminder = threading.Thread(target=self._remind, name="progress-reminder", daemon=True)
            self._reminder.start()

    def line(self, text: str) -> None:
        """Print `text` and a newline, and flush. Characters that the stream cannot encode are escaped."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        if self._live is not None:
            self._live.console.print(Text(text), soft_wrap=True)
            return
        with self._lock:
            self._stream.write(text + "\n")
            self._stream.flush()

    def show_iteration(self, text: str) -> None:
        """Set the text shown before the phase, for example "iteration 3/20"."""
        self._iteration = text

    def enter(self, phase: str) -> None:
        """Begin `phase`; phases may be nested, and the innermost is shown."""
        self._phases.append((phase, time.monotonic()))
        self._redraw()

    def leave(self) -> None:
        """End the innermost phase."""
        self._phases.pop()
        self._redraw()

    def close(self) -> None:
        """End the live line; may be called twice."""
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
        return f"{self._iteration}  {name} ... {format_seconds(time.monotonic() - start)}".strip()

    def _redraw(self) -> None:
        if self._live is not None:
            self._live.refresh()

    def _render(self) -> Text:
        return Text(self.describe_phase(), style="dim", no_wrap=True, overflow="ellipsis")

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
