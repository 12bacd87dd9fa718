"""What a run says as text: metrics, samples and durations as one line or a few, on a terminal (a live display under the
lines already printed) or in a log file (lines only).

Every line is also in a log of the run's folder, with date and time, unbroken.
"""

from __future__ import annotations

import contextlib
import os
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import rich.progress
from rich.console import Console, RenderableType
from rich.text import Text

if TYPE_CHECKING:
    # The doctor and `megarl --help` start without torch.
    from megarl.types import Metrics, Response, Sample

Decode = Callable[[list[int]], str | list[str]]
"""A tokenizer's `decode`; with special tokens, which show where an observation's messages begin"""

LOG_NAME = "train.log"
LOG_WIDTH = 80
"""Columns of a line in a log file or pipe"""
WEEK_S = 7 * 24 * 3600.0
TIME = "time/"
KEY_METRICS = (
    ("reward/mean", "reward"),
    ("reward/correct", "correct"),
    ("reward/heldout", "held-out"),
    ("length/mean", "length"),
    ("policy/entropy", "entropy"),
    ("policy/clip_frac", "clip"),
    ("critic/explained_variance", "ev"),
    ("critic/pair_accuracy", "accuracy"),
    ("heldout/pair_accuracy", "held-out accuracy"),
    ("mismatch/kl", "mismatch kl"),
    ("replay/logprob_above", "log-prob above mean reward"),
    ("replay/logprob_below", "below"),
)
"""The metrics shown for every iteration that has them, in this order; all metrics are in metrics.jsonl."""
INDENT = " " * 4
LONGEST_TEXT = 600
"""Maximum characters printed of a prompt or response; the middle of a longer one is left out"""
MOST_LINES = 16
"""Maximum actions and observations printed of a conversation; those in its middle are left out"""


def format_number(value: float) -> str:
    """The number with at most 4 significant digits: 0.0312, 12.5, 3.1e-05."""
    return f"{value:.0f}" if abs(value) >= 1000 and abs(value) < 1e6 else f"{value:.3g}"


def format_seconds(seconds: float) -> str:
    """The duration as 0.4 s, 12 s, 3 min 20 s, 2 h 01 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def wrap(text: str, width: int) -> str:
    """The text with its longer lines broken at spaces, what follows indented. Words stay whole, as a path must."""
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False)
    lines = []
    for line in text.split("\n"):
        wrapper.subsequent_indent = " " * (len(line) - len(line.lstrip())) + INDENT
        lines += wrapper.wrap(line) if len(line) > width else [line]
    return "\n".join(lines)


def format_iteration(iteration: int, num_iterations: int, metrics: Metrics) -> str:
    """One compact line: the key metrics, then the seconds of each phase."""
    shown = [f"{label} {format_number(metrics[name])}" for name, label in KEY_METRICS if name in metrics]
    times = [f"{name.removeprefix(TIME)} {format_number(v)}" for name, v in metrics.items() if name.startswith(TIME)]
    if times:
        shown.append(f"seconds: {', '.join(times)}")
    return f"iteration {iteration}/{num_iterations}  " + " | ".join(shown)


@dataclass(frozen=True)
class ShownTurn:
    """One turn, for people."""

    action: str
    observation: str
    """Empty where there is none"""
    reward: float


def has_observations(response: Response) -> bool:
    """Whether there is more to show than one action."""
    return len(response.turns) > 1 or not bool(response.generated.all())


def list_turns(response: Response, decode: Decode | None) -> list[ShownTurn]:
    """The turns in order; without an action, one first where the response begins with an observation.

    decode: reads an observation's tokens; None: their number stands in its place.
    """

    def read(start: int, end: int) -> str:
        if start == end:
            return ""
        return str(decode(response.token_ids[start:end].tolist())) if decode else f"[{end - start} tokens]"

    turns = response.turns
    ends = [turn.start for turn in turns[1:]] + [len(response)]
    shown = [ShownTurn(turn.text, read(turn.end, end), turn.reward) for turn, end in zip(turns, ends, strict=True)]
    return [*([ShownTurn("", first, 0.0)] if (first := read(0, turns[0].start)) else []), *shown]


def format_sample(sample: Sample, decode: Decode | None = None) -> str:
    """Verdict, prompt, response and expected answer in four lines, safe to print; a conversation has a line for each
    action and each observation in place of the response's. decode: as in `list_turns`.
    """
    response, score = sample.response, sample.score
    verdict, numbers = "correct" if score.correct else "wrong", {"reward": score.reward, **score.details}
    rewards = ", ".join(f"{name} {format_number(value)}" for name, value in numbers.items())
    if score.failure is not None:
        verdict, rewards = "no reward", shorten(make_printable(score.failure))
    size, lines = f"{len(response.token_ids)} tokens", [("response", response.text)]
    if has_observations(response):
        size = f"{len(response.turns)} turns, {int(response.generated.sum())} of {len(response)} tokens generated"
        lines = []
        for turn in list_turns(response, decode):
            lines.append((f"action ({format_number(turn.reward)})" if turn.reward else "action", turn.action))
            lines += [("observation", turn.observation)] if turn.observation else []
        if (num_left_out := len(lines) - MOST_LINES) > 0:
            half = MOST_LINES // 2
            lines[half:-half] = [("...", f"[{num_left_out} actions and observations]")]
    lines = [("prompt", sample.prompt.text), *lines, ("expected", sample.prompt.answer)]
    width = max(len(label) for label, _ in lines)
    head = f"sample {make_printable(sample.prompt.id)}: {verdict}, {rewards}, {size}"
    shown = [f"  {label.ljust(width)}  {shorten(make_printable(text))}" for label, text in lines]
    return "\n".join([f"{head}, ended by {response.finish_reason.value}", *shown])


def format_samples(samples: Sequence[Sample], num_samples: int, decode: Decode | None = None) -> str:
    """The first `num_samples`; where there are both, at least one correct and one wrong. decode: as in `list_turns`."""
    chosen = list(samples[:num_samples])
    for wanted in (True, False):
        others = [s for s in samples if s.score.correct is wanted and s.score.failure is None]
        if len(chosen) > 1 and others and all(s.score.correct is not wanted for s in chosen):
            chosen[-1] = others[0]
    return "\n".join(format_sample(sample, decode) for sample in chosen)


def format_heldout(rewards: Sequence[tuple[int, float]]) -> str:
    """`held-out reward: 0.0143 before training, 0.273 after iteration 17; best 0.28 after iteration 12`.

    rewards: of the evaluations (iteration, reward), in order; one at least.
    """

    def show(point: tuple[int, float]) -> str:
        return f"{format_number(point[1])} {'before training' if point[0] == 0 else f'after iteration {point[0]}'}"

    first, last, best = rewards[0], rewards[-1], max(rewards, key=lambda point: point[1])
    shown = [show(first), show(last)] if len(rewards) > 1 else [show(first)]
    return f"held-out reward: {', '.join(shown)}" + (f"; best {show(best)}" if best not in (first, last) else "")


def make_printable(text: str) -> str:
    """The text with control characters escaped: a response must not move the cursor or break the line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shorten(text: str, longest: int = LONGEST_TEXT) -> str:
    """The text, or its two ends around the number of characters left out."""
    if len(text) <= longest:
        return text
    end = longest // 2
    return f"{text[:end]} [... {len(text) - 2 * end} characters ...] {text[-end:]}"


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
