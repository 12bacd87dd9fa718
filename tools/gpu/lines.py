"""The lines of tools/check_gpu.py's table: a number, the bound that it must keep, and the verdict that follows."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

EXIT_HOLDS, EXIT_FAILS = 0, 1


class Verdict(StrEnum):
    holds = "holds"
    fails = "fails"
    skipped = "skipped"
    """Nothing was found out; the reason says what is missing."""


@dataclass(frozen=True)
class Line:
    check: str
    what: str
    verdict: Verdict
    value: float | None = None
    """None: nothing was measured, or the number is not finite"""
    bound: str = ""
    """As text, with its direction: <= 0.1"""
    unit: str = ""
    reason: str = ""
    """Why nothing was measured, or what else was seen"""


def read_line(content: dict[str, Any]) -> Line:
    return Line(**{**content, "verdict": Verdict(content["verdict"])})


def judge(
    check: str,
    what: str,
    value: float,
    *,
    most: float | None = None,
    least: float | None = None,
    unit: str = "",
    reason: str = "",
) -> Line:
    """A line whose verdict follows from `least` <= value <= `most`; a value that is not finite keeps no bound.

    Raises ValueError without a bound: what has none cannot hold.
    """
    if most is None and least is None:
        raise ValueError(f"{check}, {what}: a verdict needs a bound")
    keeps = math.isfinite(value) and (most is None or value <= most) and (least is None or value >= least)
    parts = [f">= {least:g}"] if least is not None else []
    parts += [f"<= {most:g}"] if most is not None else []
    if not math.isfinite(value):
        reason = f"{value}; {reason}" if reason else str(value)
    number = value if math.isfinite(value) else None
    return Line(check, what, Verdict.holds if keeps else Verdict.fails, number, ", ".join(parts), unit, reason)


def skip(check: str, what: str, reason: str, value: float | None = None, unit: str = "") -> Line:
    """value: what was measured although there is nothing to judge it by."""
    return Line(check, what, Verdict.skipped, value, "", unit, reason)


def fail(check: str, what: str, reason: str) -> Line:
    return Line(check, what, Verdict.fails, reason=reason)


def make_table(lines: Iterable[Line]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, side in {"check": "left", "what": "left", "value": "right", "bound": "right"}.items():
        table.add_column(name, justify="right" if side == "right" else "left", no_wrap=True)
    for name in ("unit", "verdict", "note"):
        table.add_column(name, no_wrap=name != "note")
    for line in lines:
        value = "-" if line.value is None else f"{line.value:.3g}"
        table.add_row(line.check, line.what, value, line.bound, line.unit, line.verdict.value, line.reason)
    return table


def count_verdicts(lines: Sequence[Line]) -> str:
    return ", ".join(f"{sum(line.verdict is verdict for line in lines)} {verdict.value}" for verdict in Verdict)


def conclude(lines: Sequence[Line]) -> tuple[str, int]:
    """The last line of the output, and the exit code: 0 only where nothing fails and something holds."""
    text = count_verdicts(lines)
    failing = sorted({line.check for line in lines if line.verdict is Verdict.fails})
    if failing:
        return f"FAILS ({text}): {', '.join(failing)}", EXIT_FAILS
    if not any(line.verdict is Verdict.holds for line in lines):
        return f"FAILS ({text}): nothing could be checked", EXIT_FAILS
    return f"nothing fails ({text})", EXIT_HOLDS


def write_json(path: Path, content: dict[str, Any], lines: Sequence[Line]) -> None:
    """The content, then the verdict and the lines."""
    verdict, _ = conclude(lines)
    whole = {**content, "verdict": verdict, "lines": [asdict(line) for line in lines]}
    path.write_text(json.dumps(whole, indent=2, allow_nan=False) + "\n")
