"""What a run's metrics.jsonl tells about its critic, as SVG files (tools/critic_pictures.py).

A picture by position, length or value has the median of each third of the run, over the iterations that have the
metric. docs/results/critics.md says how to read each picture.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from megarl.report.metrics import FILE_NAME, ITERATION, load_metrics
from megarl.report.svg import HEIGHT, LEFT, WIDTH, Curve, draw_lines

EXPLAINED = "critic/explained_variance"
QUARTERS = ("0_25", "25_50", "50_75", "75_100")
"""Of a response, as metrics name them; `megarl.algo.diagnostics.QUARTERS`, which this room may not import"""
LOWEST = -1.0
"""Explained variance below it is drawn there, so that a few responses of one length do not hide the rest."""
HEAD, ROW = 46, 16
GRAY = 3
"""Number of the colour of what is compared with"""
LIGHT = ("#ffffff", "#1c1d1f", "#5d6066", "#e3e3df", "#2a6fdb", "#d9772b", "#178f79", "#8b8e94")
DARK = ("#1d1f22", "#e9e9e6", "#a9acb2", "#303338", "#6aa3ff", "#f0a05c", "#4cc9b0", "#74777d")
"""Background, title, text, grid, and the curves by number, as in sweep.css; without variables, which not every program
that draws an SVG file knows"""

Lines = Sequence[Mapping[str, float]]
Point = tuple[float, float]


@dataclass(frozen=True)
class Picture:
    name: str
    """of its file"""
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
        _build_over_time(
            "explained_variance",
            "Explained variance of the returns",
            lines,
            {EXPLAINED: "all tokens", "critic/ev_at_0_25": "first quarter", "critic/ev_at_75_100": "last quarter"},
            lambda value: max(value, LOWEST),
        ),
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
        _build_error(lines),
    ]
    return [picture for picture in found if any(curve.group != GRAY for curve in picture.curves)]


def _build_over_time(
    name: str, title: str, lines: Lines, labels: Mapping[str, str], show: Callable[[float], float] = float
) -> Picture:
    curves = _number_curves(
        (label, [(line[ITERATION], show(line[metric])) for line in lines if metric in line])
        for metric, label in labels.items()
    )
    return Picture(name, title, "iteration", curves)


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


def _build_error(lines: Lines) -> Picture:
    baseline = _find_baseline(lines)
    labels = {
        f"critic/mse_vs_{baseline}": "critic, all tokens",
        f"critic/mse_vs_{baseline}_first": "critic, first state",
    }
    title = f"Squared error against the {baseline}'s mean"
    picture = _build_over_time("error_against_mean", title, lines, labels)
    iterations = [line[ITERATION] for line in lines]
    ends = (iterations[0], iterations[-1]) if lines else ()
    equal = Curve("", f"mean of the {baseline}'s other responses", GRAY, [(iteration, 1.0) for iteration in ends])
    return Picture(picture.name, picture.title, picture.x, (*picture.curves, equal))


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


def _format_style(colours: Sequence[str]) -> str:
    page, title, text, grid, *curves = colours
    rules = [
        f".page {{ fill: {page}; }} text {{ fill: {text}; font: 11px system-ui, sans-serif; }}",
        f"text.title {{ fill: {title}; font: 600 13px system-ui, sans-serif; }}",
        f".grid {{ stroke: {grid}; }} .axis {{ stroke: {text}; }} .hit {{ display: none; }}",
        ".line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }",
    ]
    rules += [f".g{n} .line {{ stroke: {c}; }} .g{n} .end {{ fill: {c}; }}" for n, c in enumerate(curves)]
    return " ".join(rules)


def draw_picture(picture: Picture) -> str:
    """A file of its own, which follows the reader's light or dark theme."""
    height = HEAD + HEIGHT + ROW * (len(picture.curves) + 1)
    chart = draw_lines(picture.curves, picture.whole)
    parts = [
        f'<rect class="page" width="{WIDTH}" height="{height}"/>',
        f'<text class="title" x="12" y="22">{escape(picture.title)}</text>',
        chart.replace("<svg ", f'<svg y="{HEAD - 10}" width="{WIDTH}" height="{HEIGHT}" ', 1),
        f'<text x="{LEFT}" y="{HEAD + HEIGHT}">{escape(picture.x)}</text>',
    ]
    for number, curve in enumerate(picture.curves, start=1):
        y = HEAD + HEIGHT + ROW * number
        parts.append(f'<g class="g{curve.group}"><path class="line" d="M {LEFT} {y - 4} h 16"/>')
        parts.append(f'<text x="{LEFT + 24}" y="{y}">{escape(curve.label)}</text></g>')
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    style = f"{_format_style(LIGHT)} @media (prefers-color-scheme: dark) {{ {_format_style(DARK)} }}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><style>{style}</style>{"".join(parts)}</svg>\n'


def write_pictures(run_dir: Path, out: Path) -> list[Path]:
    """Draw RUN_DIR/metrics.jsonl into `out`; the files' paths.

    Raises FileNotFoundError, or ValueError where the metrics cannot be read or are not those of a critic.
    """
    path = run_dir / FILE_NAME
    pictures = build_pictures(load_metrics(path))
    if not pictures:
        raise ValueError(f"{path}: no line has {EXPLAINED}; found no iteration of an algorithm with a critic")
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{picture.name}.svg" for picture in pictures]
    for picture, file in zip(pictures, paths, strict=True):
        file.write_text(draw_picture(picture), encoding="utf-8")
    return paths
