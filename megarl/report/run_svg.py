"""Charts of one run, or of two, over the iterations: lines with the range of what each point stands for, and areas.

All charts of a page share one horizontal axis. What a chart shows is also in `Drawn.data`, from which run.js shows the
values at the pointer. Colours as in `svg`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.report.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, build_axis, draw_grid, needs_log, wrap

NUM_DIGITS = 4
"""Of the values at the pointer"""
RANGE_SHARE = 0.95
"""Share of the points whose whole range is drawn; the others, spikes, are cut at the chart's edge"""
MOST_DOTS = 40
"""A curve of so few points has a dot at each"""
CURSOR = f'<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'


@dataclass(frozen=True)
class Series:
    label: str
    group: int
    """Number of its colour"""
    run: int
    """0, or 1 for the run that is compared with: a dashed line"""
    indices: Sequence[int]
    """Which points of the run's history it has, ascending"""
    iterations: Sequence[int]
    values: Sequence[float]
    lows: Sequence[float]
    highs: Sequence[float]
    """Least and largest value of the iterations that each point stands for"""


@dataclass(frozen=True)
class Drawn:
    svg: str
    data: Sequence[Mapping[str, Any]]
    """Of each series: "r" its run, "i" the indices of its points (the first alone where none is missing), "v" their
    values"""
    is_log: bool


def draw_series(series: Sequence[Series], domain: tuple[int, int], floor: float = -math.inf) -> Drawn:
    """Lines over the iterations; values below `floor` are drawn there. domain: first and last iteration of the page."""
    drawn = [each for each in series if each.values]
    values = [max(value, floor) for each in drawn for value in each.values]
    is_log = needs_log(values)
    ends = [*values, *_find_ends(drawn, floor)]
    # A share that is always 0 lies on the axis.
    ends += [] if any(ends) else [1.0]
    low = min(values)

    def scale(value: float) -> float:
        return math.log10(max(value, low)) if is_log else max(value, floor)

    x = build_axis(domain, LEFT, WIDTH - RIGHT)
    y = build_axis([scale(value) for value in ends], HEIGHT - BOTTOM, TOP, margin=0.04)

    def place(value: float) -> float:
        return min(max(y.place(scale(value)), TOP), HEIGHT - BOTTOM)

    parts = list(draw_grid(x, y, is_log, True))
    parts += [_draw_range(each, x, place) for each in drawn if each.lows != each.values]
    for each in drawn:
        points = [(x.place(i), place(value)) for i, value in zip(each.iterations, each.values, strict=True)]
        dashed = " second" if each.run else ""
        parts.append(f'<g class="curve g{each.group}{dashed}">')
        if len(points) > 1:
            parts.append(f'<polyline class="line" points="{_join(points)}"/>')
        if len(points) <= MOST_DOTS:
            parts += [f'<circle class="end" cx="{across:.1f}" cy="{up:.1f}" r="1.6"/>' for across, up in points[:-1]]
        parts.append(f'<circle class="end" cx="{points[-1][0]:.1f}" cy="{points[-1][1]:.1f}" r="2.6"/></g>')
    return Drawn(wrap(WIDTH, HEIGHT, [*parts, CURSOR]), [_to_data(each) for each in drawn], is_log)


def _find_ends(series: Sequence[Series], floor: float) -> Iterator[float]:
    """Lows and highs without the most extreme, so that one spike does not flatten the rest."""
    for each in series:
        kept = math.ceil(RANGE_SHARE * len(each.values))
        yield max(sorted(each.lows, reverse=True)[kept - 1], floor)
        yield max(sorted(each.highs)[kept - 1], floor)


def _draw_range(each: Series, x: Axis, place: Callable[[float], float]) -> str:
    upper = [(x.place(i), place(value)) for i, value in zip(each.iterations, each.highs, strict=True)]
    lower = [(x.place(i), place(value)) for i, value in zip(each.iterations, each.lows, strict=True)]
    return f'<polygon class="range g{each.group}" points="{_join([*upper, *reversed(lower)])}"/>'


def draw_stack(series: Sequence[Series], domain: tuple[int, int]) -> Drawn:
    """Areas upon one another, the first at the bottom, of one run; a point that a series lacks counts as 0."""
    indices = sorted({index for each in series for index in each.indices})
    at = {index: i for each in series for index, i in zip(each.indices, each.iterations, strict=True)}
    found = [dict(zip(each.indices, each.values, strict=True)) for each in series]
    base = dict.fromkeys(indices, 0.0)
    bounds = [base]
    for values in found:
        base = {index: base[index] + values.get(index, 0.0) for index in indices}
        bounds.append(base)
    x = build_axis(domain, LEFT, WIDTH - RIGHT)
    y = build_axis([0.0, max(base.values()) or 1.0], HEIGHT - BOTTOM, TOP)
    parts = list(draw_grid(x, y, False, True))
    # One iteration is a bar of the whole width.
    across = [LEFT, WIDTH - RIGHT] if len(indices) == 1 else [x.place(at[index]) for index in indices]
    for each, lower, upper in zip(series, bounds, bounds[1:], strict=False):
        tops, bottoms = ([y.place(level[i]) for i in indices] for level in (upper, lower))
        if len(indices) == 1:
            tops, bottoms = 2 * tops, 2 * bottoms
        outline = [*zip(across, tops, strict=True), *reversed(list(zip(across, bottoms, strict=True)))]
        parts.append(f'<polygon class="area g{each.group}" points="{_join(outline)}"/>')
    return Drawn(wrap(WIDTH, HEIGHT, [*parts, CURSOR]), [_to_data(each) for each in series], False)


def draw_bars(bins: Sequence[tuple[float, Sequence[int]]], groups: Sequence[int]) -> str:
    """Counts upon one another, the first at the bottom. bins: (lower end, count of each group), of equal width."""
    width = bins[1][0] - bins[0][0] if len(bins) > 1 else 1.0
    x = build_axis([bins[0][0], bins[-1][0] + width], LEFT, WIDTH - RIGHT)
    y = build_axis([0.0, max(sum(counts) for _, counts in bins)], HEIGHT - BOTTOM, TOP)
    parts = list(draw_grid(x, y, False, True))
    for low, counts in bins:
        start, base = x.place(low), 0
        for group, count in zip(groups, counts, strict=True):
            top, bottom = y.place(base + count), y.place(base)
            size = f'width="{x.place(low + width) - start - 1:.1f}" height="{bottom - top:.1f}"'
            parts.append(f'<rect class="area g{group}" x="{start:.1f}" y="{top:.1f}" {size}/>')
            base += count
    return wrap(WIDTH, HEIGHT, parts)


def _join(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _to_data(each: Series) -> dict[str, Any]:
    first, last = each.indices[0], each.indices[-1]
    whole = last - first + 1 == len(each.indices)
    values = [float(f"{value:.{NUM_DIGITS}g}") for value in each.values]
    return {"r": each.run, "i": first if whole else each.indices, "v": values}
