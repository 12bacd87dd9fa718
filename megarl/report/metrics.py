"""metrics.jsonl: one strict JSON object per line, {"iteration": 3, "reward/mean": 0.5, ...}."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from megarl.json_text import naming_file, parse_strict_json
from megarl.types import Metrics

FILE_NAME = "metrics.jsonl"
ITERATION = "iteration"


def check_metrics(metrics: Metrics) -> None:
    """Refuse values that strict JSON cannot represent as a number.

    Raises:
        ValueError: a value is NaN or infinite, or a metric is named "iteration".
        TypeError: a name is not a string, or a value is not an int or a float.
    """
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise TypeError(f"metric name {name!r} is {type(name).__name__}, not a string")
        if name == ITERATION:
            raise ValueError(f"a metric may not be named {ITERATION!r}: the line's own key has that name")
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
        self.num_dropped_bytes = drop_unfinished_line(path)
        """Length of a half-written last line, left by a killed run, that was cut off; usually 0"""
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


def drop_unfinished_line(path: Path) -> int:
    """Truncate the file to its last newline. Returns the number of bytes removed."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
    return len(content) - end


def load_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl, in order, each with "iteration" among its keys.

    Raises:
        ValueError: a line is not a JSON object of finite numbers with a whole "iteration"; says FILE:LINE.
        FileNotFoundError: there is no such file.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [parse_line(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]


def parse_line(line: str, where: str) -> dict[str, float]:
    """Parse one line of metrics.jsonl. Raises ValueError starting with `where`."""
    if not line.endswith("\n"):
        raise ValueError(f"{where}: the line is incomplete: the run that wrote it was killed, or is still writing")
    try:
        record = parse_strict_json(line)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a JSON {type(record).__name__}, not an object with metrics: {line.strip()[:80]}")
    if not isinstance(record.get(ITERATION), int) or isinstance(record[ITERATION], bool):
        raise ValueError(f'{where}: "{ITERATION}" is {record.get(ITERATION)!r}, not a whole number')
    try:
        check_metrics({name: value for name, value in record.items() if name != ITERATION})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
    return record
