"""What a run's metrics.jsonl tells about its critic, by position, length and value.

A picture has the median of each third of the run, over the iterations that have the metric. docs/results/critics.md
says how to read each.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megarl.report.metric_names import QUARTERS
from megarl.report.metrics import ITERATION
from megarl.report.svg import Curve

EXPLAINED = "critic/explained_variance"
LOWEST = -1.0
"""Explained variance below it is drawn there, so that a few responses of one length do not hide the rest."""
GRAY = 3
"""Number of the colour of what is compared with"""
Lines = Sequence[Mapping[str, float]]
Point = tuple[float, float]


@dataclass(frozen=True)
class Picture:
    name: str
    title: str
    x: str
    """What the horizontal axis is"""
    curves: tuple[Curve, ...]
    """Their labels are the legend's."""
    whole: bool = True
    """as in `draw_lines`"""


def build_pictures(lines: Lines) -> list[Picture]:
    """The pictures that these metrics allow. lines: of metrics.jsonl, in order."""
    lines = [line for line in lines if EXPLAINED in line]
    found = [
        build_by_part(
            "explained_variance_by_position",
            "Explained variance by position",
            "quarter of the response",
            lines,
            [f"critic/ev_at_{quarter}" for quarter in QUARTERS],
        ),
        build_by_part(
            "explained_variance_by_length",
            "Explained variance by length",
            "quartile of the responses' length",
            lines,
            [f"critic/ev_length_q{number}" for number in range(1, 5)],
        ),
        _build_calibration("first", lines),
        _build_calibration("middle", lines),
        _build_snr(lines),
    ]
    return [picture for picture in found if any(curve.group != GRAY for curve in picture.curves)]


def build_by_part(name: str, title: str, x: str, lines: Lines, metrics: Sequence[str]) -> Picture:
    """One point for each of the metrics, from 1 on, and one curve for each third of the run; nothing below LOWEST."""
    curves = []
    for label, part in _split_thirds(lines):
        middles = [_find_median(part, metric) for metric in metrics]
        curves.append((label, [(n, max(y, LOWEST)) for n, y in enumerate(middles, start=1) if y is not None]))
    return Picture(name, title, x, _number_curves(curves))


def _build_calibration(state: str, lines: Lines) -> Picture:
    curves: list[tuple[str, list[Point]]] = []
    for label, part in _split_thirds(lines):
        pairs = [
            (_find_median(part, f"critic/value_{state}_q{q}"), _find_median(part, f"critic/outcome_{state}_q{q}"))
            for q in range(1, 5)
        ]
        curves.append(
            (label, [(value, outcome) for value, outcome in pairs if value is not None and outcome is not None])
        )
    numbered = _number_curves(curves)
    values = [point[0] for curve in numbered for point in curve.points]
    ends = (min(values), max(values)) if values else ()
    diagonal = Curve("", "perfectly calibrated", GRAY, [(x, x) for x in ends])
    title = f"Calibration of the value of the {state} state"
    return Picture(f"calibration_{state}", title, "mean value; vertical: mean outcome", (*numbered, diagonal), False)


def _build_snr(lines: Lines) -> Picture:
    curves: list[tuple[str, list[Point]]] = []
    for label, part in _split_thirds(lines):
        curves.append((label, _find_ratios(part, "advantage/signal_frac")))
    baseline = _find_baseline(lines)
    points = _find_ratios(lines, f"advantage/signal_frac_{baseline}")
    others = (Curve("", f"outcome - mean of the {baseline}, whole run", GRAY, points),) if points else ()
    title = "Signal-to-noise ratio of the advantages"
    return Picture("snr_by_position", title, "quarter of the response", (*_number_curves(curves), *others))


def _find_ratios(lines: Lines, name: str) -> list[Point]:
    """(quarter, SNR) from the median share of signal; 0 where none is found, left out where no noise is."""
    shares = [_find_median(lines, f"{name}_at_{quarter}") for quarter in QUARTERS]
    return [
        (number, math.sqrt(max(share, 0.0) / (1 - share)))
        for number, share in enumerate(shares, start=1)
        if share is not None and share < 1
    ]


def _find_baseline(lines: Lines) -> str:
    return "group" if any("critic/mse_vs_group" in line for line in lines) else "batch"


def _split_thirds(lines: Lines) -> Iterator[tuple[str, Lines]]:
    """(iterations, lines) of each third that has any."""
    for number in range(3):
        part = lines[len(lines) * number // 3 : len(lines) * (number + 1) // 3]
        if part:
            yield f"iterations {part[0][ITERATION]:.0f} to {part[-1][ITERATION]:.0f}", part


def _find_median(lines: Lines, metric: str) -> float | None:
    values = [line[metric] for line in lines if metric in line]
    return statistics.median(values) if values else None


def _number_curves(curves: Iterable[tuple[str, Sequence[Point]]]) -> tuple[Curve, ...]:
    return tuple(Curve("", label, number, points) for number, (label, points) in enumerate(curves) if points)
