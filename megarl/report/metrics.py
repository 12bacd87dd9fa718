"""metrics.jsonl: one strict JSON object per line, {"iteration": 3, "reward/mean": 0.5, ...}.

`History` has a file of any length as at most `MOST_POINTS` points, each of `width` iterations: whenever there are too
many, each two neighbours become one.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megarl.files import naming_file, parse_strict_json
from megarl.report.text import TIME
from megarl.types import Metrics

FILE_NAME = "metrics.jsonl"
ITERATION = "iteration"
MOST_POINTS = 600
QUARTERS = ("0_25", "25_50", "50_75", "75_100")
"""Of a response, as metrics name them; `megarl.algo.diagnostics.QUARTERS`, which this room may not import"""
ONCE = ("start", "load")
"""Phases of a start, not of an iteration"""
SECONDS = "perf/time_per_step"
MODEL_TFLOP = ("policy/model_tflop_sum", "critic/model_tflop_sum")
UPDATE_TFLOPS, MFU = "derived/update_tflops", "derived/mfu"


def check_metrics(metrics: Metrics) -> None:
    """Refuse what strict JSON cannot represent as a number: ValueError, or TypeError where it is none at all."""
    for name, value in metrics.items():
        if name == ITERATION or not isinstance(name, str):
            raise ValueError(f"a metric may not be named {name!r}: it must be a text other than {ITERATION!r}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"metric {name!r} is {type(value).__name__}, not an int or a float: {value!r}")
        if not math.isfinite(value):
            raise ValueError(f"metric {name!r} is {value}: only finite numbers can be logged")


class LineFile:
    """Appends lines to a file; they are complete on disk when `append` returns."""

    def __init__(self, path: Path):
        """Open or create `path`, and cut off a half-written last line."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        end = content.rfind(b"\n") + 1
        self.num_dropped_bytes = len(content) - end
        """Length of a half-written last line, left by a killed run, that was cut off; usually 0"""
        if self.num_dropped_bytes:
            os.truncate(path, end)
        self._file = path.open("a", encoding="utf-8")

    def append(self, lines: Sequence[str]) -> None:
        """Write the lines, each with its newline. Raises OSError that names the file."""
        with naming_file(self.path):
            self._file.writelines(lines)
            self._file.flush()

    def close(self) -> None:
        self._file.close()


class MetricsWriter(LineFile):
    """Appends to a run's metrics.jsonl."""

    def write(self, iteration: int, metrics: Metrics) -> None:
        """Write one line. Raises as `check_metrics`, and then writes nothing."""
        check_metrics(metrics)
        self.append([json.dumps({ITERATION: iteration, **metrics}, allow_nan=False) + "\n"])


def load_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl, in order. Raises ValueError that says FILE:LINE, as `parse_line`."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [parse_line(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]


def parse_line(line: str, where: str) -> dict[str, float]:
    """Raises ValueError, starting with `where`, unless it is a JSON object of finite numbers with a whole iteration."""
    if not line.endswith("\n"):
        raise ValueError(f"{where}: the line is incomplete: the run that wrote it was killed, or is still writing")
    try:
        record = parse_strict_json(line)
        if not isinstance(record, dict) or type(record.get(ITERATION)) is not int:
            raise ValueError(f'not a JSON object with a whole "{ITERATION}": {line.strip()[:80]}')
        check_metrics({name: value for name, value in record.items() if name != ITERATION})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
    return record


@dataclass
class Range:
    """One metric over the iterations of a point."""

    count: int
    total: float
    low: float
    high: float

    @property
    def mean(self) -> float:
        return self.total / self.count


@dataclass
class Point:
    first: int
    last: int
    """The iterations of its first and last line"""
    num_lines: int
    metrics: dict[str, Range]

    def add(self, other: "Point") -> None:
        self.last, self.num_lines = other.last, self.num_lines + other.num_lines
        for name, new in other.metrics.items():
            old = self.metrics.get(name, Range(0, 0.0, math.inf, -math.inf))
            low, high = min(old.low, new.low), max(old.high, new.high)
            self.metrics[name] = Range(old.count + new.count, old.total + new.total, low, high)


@dataclass
class History:
    """The points of one file, and of each metric, over all its lines: sum, number, newest value, and the largest with
    the first iteration that has it.
    """

    points: list[Point] = field(default_factory=list)
    width: int = 1
    """Lines of every point but the last"""
    num_lines: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    best: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, line: dict[str, float]) -> None:
        """Take the next line of the file."""
        iteration = int(line[ITERATION])
        point = Point(iteration, iteration, 1, {})
        self.num_lines += 1
        for name, value in line.items():
            if name == ITERATION:
                continue
            point.metrics[name] = Range(1, value, value, value)
            self.last[name], self.counts[name] = value, self.counts.get(name, 0) + 1
            self.sums[name] = self.sums.get(name, 0.0) + value
            if name not in self.best or value > self.best[name][0]:
                self.best[name] = value, iteration
        if self.points and self.points[-1].num_lines < self.width:
            self.points[-1].add(point)
            return
        if len(self.points) == MOST_POINTS:
            for first, second in zip(self.points[::2], self.points[1::2], strict=True):
                first.add(second)
            self.points, self.width = self.points[::2], 2 * self.width
        self.points.append(point)

    @property
    def seconds(self) -> float:
        """The sum of all phases."""
        return sum(total for name, total in self.sums.items() if name.startswith(TIME))

    @property
    def num_iterations(self) -> int:
        """Without those of value pretraining."""
        return max(0, self.points[-1].last) if self.points else 0

    @property
    def names(self) -> list[str]:
        """All metrics, in the order in which they appear."""
        return list(self.last)

    @property
    def lines(self) -> list[dict[str, float]]:
        """The means of each point, as lines of a shorter metrics.jsonl."""
        means = ({name: found.mean for name, found in point.metrics.items()} for point in self.points)
        return [{ITERATION: point.last, **each} for point, each in zip(self.points, means, strict=True)]

    def list_recent(self, metric: str, number: int = MOST_POINTS) -> list[float]:
        """The means of the metric in its last `number` points that have it."""
        return [point.metrics[metric].mean for point in self.points if metric in point.metrics][-number:]


def load_history(path: Path, problems: list[str]) -> History:
    """Read the file, with what `derive_metrics` adds; lines that cannot be read are left out, and `problems` names the
    first of them.
    """
    history, bad = History(), list[str]()
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, text in enumerate(file, start=1):
                try:
                    line = parse_line(text, f"{path}:{number}")
                    history.add(line | derive_metrics(line))
                except ValueError as error:
                    bad.append(str(error))
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error}")
    if bad:
        problems.append(bad[0] if len(bad) == 1 else f"{bad[0]} (and {len(bad) - 1} lines more)")
    return history


def derive_metrics(line: Mapping[str, float]) -> dict[str, float]:
    """derived/* of an iteration, which its line implies.

    rollout_frac: share of its seconds in which the roles wait for responses. servers_idle_frac: share without a rollout
    or an evaluation; with rollout.max_staleness the servers generate then, too. update_tflops: 1e12 model operations a
    second of policy and critic during the update.
    """
    seconds, rollout, update = line.get(SECONDS, 0.0), line.get("time/rollout"), line.get("time/update", 0.0)
    if rollout is None or seconds <= 0:
        return {}
    generating = rollout + line.get("time/evaluate", 0.0)
    derived = {"derived/rollout_frac": rollout / seconds, "derived/servers_idle_frac": 1 - generating / seconds}
    tflop = [line[name] for name in MODEL_TFLOP if name in line]
    return derived | ({UPDATE_TFLOPS: sum(tflop) / update} if tflop and update > 0 else {})


def add_mfu(history: History, peak_tflops: float) -> None:
    """Put MFU, the update's model operations a second over this peak, into all points that have them."""
    for metrics in (point.metrics for point in history.points):
        if (rate := metrics.get(UPDATE_TFLOPS)) is not None:
            metrics[MFU] = Range(rate.count, *(x / peak_tflops for x in (rate.total, rate.low, rate.high)))
    if UPDATE_TFLOPS in history.last:
        history.last[MFU] = history.last[UPDATE_TFLOPS] / peak_tflops
