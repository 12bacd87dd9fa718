"""A metrics.jsonl of any length as at most `MOST_POINTS` points, read line by line.

A point stands for `width` iterations that follow one another, 1 as long as the file is short. Whenever there are too
many points, each two neighbours become one, so that the file is read once and its length need not be known.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megarl.json_text import parse_json
from megarl.report.metrics import ITERATION, parse_line
from megarl.report.text import TIME

MOST_POINTS = 600
ONCE = ("start", "load")
"""Phases of a start, not of an iteration"""
SECONDS = "derived/seconds"
MODEL_TFLOP = ("policy/model_tflop_sum", "critic/model_tflop_sum")
UPDATE_TFLOPS, MFU = "derived/update_tflops", "derived/mfu"
TOTAL = "sampling/total_samples"


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

    def add(self, other: "Range") -> None:
        self.count += other.count
        self.total += other.total
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)


@dataclass
class Point:
    first: int
    last: int
    """The iterations of its first and last line"""
    num_lines: int
    metrics: dict[str, Range]

    def add(self, other: "Point") -> None:
        self.last, self.num_lines = other.last, self.num_lines + other.num_lines
        for name, found in other.metrics.items():
            if name in self.metrics:
                self.metrics[name].add(found)
            else:
                self.metrics[name] = found


@dataclass
class History:
    """The points of one file; `best`, `last` and `seconds` are over its lines, not over the points."""

    points: list[Point] = field(default_factory=list)
    width: int = 1
    """Lines of every point but the last"""
    num_lines: int = 0
    seconds: float = 0.0
    """The sum of all phases"""
    sums: dict[str, float] = field(default_factory=dict)
    """Of each metric of seconds, over all lines"""
    counts: dict[str, int] = field(default_factory=dict)
    """How many lines have each metric"""
    last: dict[str, float] = field(default_factory=dict)
    """The newest value of each metric"""
    best: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Of each metric, the largest value and the first iteration that has it"""

    def add(self, line: dict[str, float]) -> None:
        """Take the next line of the file."""
        iteration = int(line[ITERATION])
        values = {name: value for name, value in line.items() if name != ITERATION}
        self.num_lines += 1
        for name, value in values.items():
            self.counts[name] = self.counts.get(name, 0) + 1
            if name.startswith(TIME) or name == SECONDS:
                self.sums[name] = self.sums.get(name, 0.0) + value
        self.seconds += sum(value for name, value in values.items() if name.startswith(TIME))
        self.last.update(values)
        for name, value in values.items():
            if name not in self.best or value > self.best[name][0]:
                self.best[name] = value, iteration
        point = Point(iteration, iteration, 1, {name: Range(1, value, value, value) for name, value in values.items()})
        if self.points and self.points[-1].num_lines < self.width:
            self.points[-1].add(point)
            return
        if len(self.points) == MOST_POINTS:
            self._halve()
        self.points.append(point)

    def _halve(self) -> None:
        for first, second in zip(self.points[::2], self.points[1::2], strict=True):
            first.add(second)
        self.points, self.width = self.points[::2], 2 * self.width

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
        return [
            {ITERATION: point.last} | {name: found.mean for name, found in point.metrics.items()}
            for point in self.points
        ]

    def list_recent(self, metric: str, number: int) -> list[float]:
        """The means of the metric in its last `number` points that have it."""
        found = [point.metrics[metric].mean for point in reversed(self.points) if metric in point.metrics]
        return found[:number][::-1]


def load_history(path: Path, problems: list[str], *, needed: bool = False) -> History:
    """Read the file, with what `derive_metrics` adds; lines that cannot be read are left out, and `problems` names the
    first of them. needed: a missing file is a problem, too.
    """
    history, first, num_bad = History(), "", 0
    try:
        for number, text in read_lines(path):
            try:
                line = parse_line(text, f"{path}:{number}")
                history.add(line | derive_metrics(line, history.last))
            except ValueError as error:
                first, num_bad = first or str(error), num_bad + 1
    except FileNotFoundError:
        if needed:
            problems.append(f"{path}: is missing")
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error}")
    if num_bad:
        problems.append(first if num_bad == 1 else f"{first} (and {num_bad - 1} lines more)")
    return history


def derive_metrics(line: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """derived/* of an iteration, which its line implies. before: the newest value of each metric before it.

    seconds: its phases' sum, without start and load. rollout_frac: share of it in which the roles wait for responses.
    servers_idle_frac: share without a rollout or an evaluation; with rollout.max_staleness the servers generate then,
    too. generated_tokens_per_second: new responses times their mean length, over the iteration's seconds.
    update_tflops: 1e12 model operations a second of policy and critic during the update.
    """
    times = {name.removeprefix(TIME): value for name, value in line.items() if name.startswith(TIME)}
    seconds = sum(value for name, value in times.items() if name not in ONCE)
    if "rollout" not in times or seconds <= 0:
        return {}
    generating = times["rollout"] + times.get("evaluate", 0.0)
    derived = {
        SECONDS: seconds,
        "derived/rollout_frac": times["rollout"] / seconds,
        "derived/servers_idle_frac": 1 - generating / seconds,
    }
    tflop = [line[name] for name in MODEL_TFLOP if name in line]
    if tflop and times.get("update", 0.0) > 0:
        derived[UPDATE_TFLOPS] = sum(tflop) / times["update"]
    if TOTAL in line and "length/mean" in line:
        num_samples = line[TOTAL] - before.get(TOTAL, 0.0)
        derived["derived/generated_tokens_per_second"] = max(0.0, num_samples) * line["length/mean"] / seconds
    return derived


def add_mfu(history: History, peak_tflops: float) -> None:
    """Put MFU, the update's model operations a second over this peak, into all points that have them."""
    for metrics in (point.metrics for point in history.points):
        if (rate := metrics.get(UPDATE_TFLOPS)) is not None:
            metrics[MFU] = Range(rate.count, *(x / peak_tflops for x in (rate.total, rate.low, rate.high)))
    if UPDATE_TFLOPS in history.last:
        history.last[MFU] = history.last[UPDATE_TFLOPS] / peak_tflops


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from enumerate(file, start=1)


def sample_lines(path: Path, number: int, whole_bytes: int = 8_000_000) -> Iterator[dict[str, object]]:
    """At most `number` JSON objects of a file of one a line, spread evenly over its bytes; all of them where the file
    has at most `whole_bytes`.

    No more than these lines is read. A line that is not a JSON object, as the last one of a file that grows, is left
    out.
    """
    size = path.stat().st_size
    step = 0 if size <= whole_bytes else -(-size // number)
    with path.open("rb") as file:
        target = 0
        while file.tell() < size:
            if target > file.tell():
                file.seek(target)
                file.readline()
            line = file.readline()
            target += step
            if not line.endswith(b"\n"):
                return
            try:
                record = parse_json(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record
