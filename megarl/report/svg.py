"""Charts as inline SVG: lines over iterations, and the runs behind each value of a parameter.

Colours are CSS variables of the page (`--c0` ... `--c7`, by the class `g0` ... `g7` of a line), so that a chart follows
the reader's light or dark theme. Every text is escaped.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from megarl.report.compare import Effect
from megarl.report.text import format_number

WIDTH, HEIGHT = 340, 210
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 28
NUM_TICKS = 4
OUTLIER = 20.0


@dataclass(frozen=True)
class Curve:
    run: str
    """The run's name, by which the page finds all its elements"""
    label: str
    """The tooltip"""
    group: int
    """Number of its colour"""
    points: Sequence[tuple[float, float]]
    """(iteration, value), finite"""


@dataclass(frozen=True)
class Axis:
    """A linear map from data to pixels."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def build_axis(values: Iterable[float], start: float, end: float, margin: float = 0.0) -> Axis:
    """An axis from the least to the greatest value, with a share `margin` of the range left free at each end."""
    found = list(values)
    low, high = min(found), max(found)
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    room = (high - low) * margin
    return Axis(low - room, high + room, start, end)


def choose_ticks(axis: Axis, number: int = NUM_TICKS) -> list[float]:
    """Round values (1, 2 or 5 times a power of ten apart) within the axis."""
    raw = (axis.high - axis.low) / number
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = math.ceil(axis.low / step - 1e-9)
    last = math.floor(axis.high / step + 1e-9)
    return [0.0 if i == 0 else i * step for i in range(first, last + 1)]


def needs_log(values: Sequence[float]) -> bool:
    """Whether a few of the values, all above 0, are so large that the others would lie on the axis."""
    return min(values) > 0 and max(values) > OUTLIER * statistics.median(values)


def draw_lines(curves: Sequence[Curve], whole: bool = True) -> str:
    """A chart of all curves over the iteration, logarithmic where `needs_log`; a curve of one point is a dot.

    whole: x has whole numbers only, as an iteration or a quarter of the responses.
    """
    drawn = [curve for curve in curves if curve.points]
    values = [point[1] for curve in drawn for point in curve.points]
    is_log = needs_log(values)
    scale = math.log10 if is_log else float
    x = build_axis([point[0] for curve in drawn for point in curve.points], LEFT, WIDTH - RIGHT)
    y = build_axis([scale(value) for value in values], HEIGHT - BOTTOM, TOP, margin=0.04)
    parts = [*draw_grid(x, y, is_log, whole)]
    for curve in drawn:
        path = " ".join(f"{x.place(i):.1f},{y.place(scale(v)):.1f}" for i, v in curve.points)
        title = f"<title>{escape(curve.label)}</title>"
        parts.append(f'<g class="curve g{curve.group}" data-run="{escape(curve.run)}">{title}')
        if len(curve.points) > 1:
            parts.append(f'<polyline class="hit" points="{path}"/><polyline class="line" points="{path}"/>')
        last = curve.points[-1]
        parts.append(f'<circle class="end" cx="{x.place(last[0]):.1f}" cy="{y.place(scale(last[1])):.1f}" r="3"/></g>')
    return wrap(WIDTH, HEIGHT, parts)


def draw_grid(x: Axis, y: Axis, is_log: bool, whole: bool) -> Iterable[str]:
    """The parts of a chart behind its curves. is_log: y is of decimal logarithms; whole: as in `draw_lines`."""
    for tick in choose_ticks(y):
        at, value = y.place(tick), 10.0**tick if is_log else tick
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 6}" y="{at + 3.5:.1f}" text-anchor="end">{format_number(value)}</text>'
    for value in choose_ticks(x, 5):
        if not whole or value == int(value):
            at, text = x.place(value), f"{value:.0f}" if whole else format_number(value)
            yield f'<text class="tick" x="{at:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{text}</text>'
    yield f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'


ROW, LABEL = 30, 110


def build_effect_axis(effects: Sequence[Effect]) -> Axis:
    """One axis for all effects, so that their charts can be compared."""
    levels = [level for effect in effects for level in effect.levels]
    ends = [level.mean + sign * (level.seed_std or 0.0) for level in levels for sign in (-1, 1)]
    return build_axis([*ends, *(point for level in levels for point in level.points)], LABEL, WIDTH - RIGHT, 0.04)


def draw_effect(effect: Effect, x: Axis) -> str:
    """A chart with a row per value: each run is a dot, the mean a bar, the spread over seeds a band around it."""
    height = ROW * len(effect.levels) + BOTTOM
    parts = []
    for value in choose_ticks(x, 5):
        at = x.place(value)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height - BOTTOM}"/>')
        text = format_number(value)
        parts.append(f'<text class="tick" x="{at:.1f}" y="{height - 10}" text-anchor="middle">{text}</text>')
    for row, level in enumerate(effect.levels):
        middle, mean = ROW * row + ROW / 2, x.place(level.mean)
        label = escape(_cut(level.value))
        parts.append(f'<text class="level" x="{LABEL - 10}" y="{middle + 4}" text-anchor="end">{label}</text>')
        if level.seed_std is not None:
            start, end = x.place(level.mean - level.seed_std), x.place(level.mean + level.seed_std)
            parts.append(
                f'<rect class="band" x="{start:.1f}" y="{middle - 9}" width="{end - start:.1f}" height="18" rx="3"/>'
            )
        dots = "".join(f'<circle class="dot" cx="{x.place(point):.1f}" cy="{middle}" r="4"/>' for point in level.points)
        parts.append(dots)
        parts.append(f'<line class="mean" x1="{mean:.1f}" x2="{mean:.1f}" y1="{middle - 11}" y2="{middle + 11}"/>')
    return wrap(WIDTH, height, parts)


def _cut(text: str, longest: int = 18) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def wrap(width: float, height: float, parts: Sequence[str]) -> str:
    """The whole element, whose size is that of its place on the page."""
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img">{"".join(parts)}</svg>'
