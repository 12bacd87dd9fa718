"""Charts as inline SVG: which ones the page of a run has, from which metrics, and how they are drawn.

Colours are CSS variables of the page (`--c0` ... `--c7`, by the class `g0` ... `g7` of a line; g8 is gray), so that a
chart follows the reader's light or dark theme. Every text is escaped.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape

from megarl.report.record import HELDOUT, MFU, ONCE, QUARTERS, History
from megarl.report.text import TIME, format_number

NUM_COLOURS = 8
GRAY = 8
"""Number of the colour of what is compared with, and of everything beyond NUM_COLOURS"""
MOST_CURVES = 12
"""Of a chart whose metrics are named by their beginning"""


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    metrics: Mapping[str, str]
    """The label of each metric; a name with * stands for all with something in its place, which * is in its label"""
    note: str = ""
    """How to read it, in a sentence"""
    floor: float = -math.inf
    """Values below are drawn there."""
    is_stack: bool = False
    without: str = ""
    """What a * does not stand for"""


GREEDY, SAMPLED = "held out, greedy", "training, sampled"
# fmt: off
LEARNING = (
    Chart("Reward", "mean per response", {HELDOUT: GREEDY, "reward/mean": SAMPLED},
          "The held-out prompts are never trained on: a gap that widens is overfitting, or a reward that is gamed."),
    Chart("Right answers", "share of responses", {"heldout/correct": GREEDY, "reward/correct": SAMPLED}),
    Chart("Parts of the reward", "training, mean", {"reward/*": "*"},
          without="mean std min max heldout correct equal_groups_frac failed_frac positive_frac shaped_mean"),
    Chart("Response length", "generated tokens",
          {"length/mean": "mean", "length/max": "longest", "length/min": "shortest"}),
    Chart("Cut off", "share of responses",
          {"length/truncated_frac": "at the length limit", "environment/max_turns_frac": "at environment.max_turns",
           "policy/dropped_frac": "left out of the policy loss"},
          "A cut response is judged without its end."),
    Chart("Groups and responses without a signal", "share",
          {"reward/equal_groups_frac": "groups of equal rewards",
           "sampling/equal_correct_frac": "sampled groups, all right",
           "sampling/equal_wrong_frac": "sampled groups, all wrong",
           "sampling/too_easy_frac": "sampled groups, too easy", "sampling/too_hard_frac": "sampled groups, too hard",
           "reward/failed_frac": "responses without a reward"},
          "Without a critic, a group of equal rewards has advantages of 0."),
    Chart("Prompts passed over", "count",
          {"sampling/num_skipped": "last group not kept", "sampling/num_outside_value": "by the critic's value"}),
    Chart("Reward by source", "training, mean per response", {"source/*/reward": "*"}),
    Chart("Right answers by source", "training, share of responses", {"source/*/correct": "*"}),
    Chart("Right answers by set", "held out or evaluated, share of responses", {"eval/*/correct": "*"}),
    Chart("Response length by source", "training, generated tokens", {"source/*/response_length": "*"}),
    Chart("Left out by dynamic sampling", "share of a source's responses", {"source/*/dropped_frac": "*"}),
    Chart("Epochs", "passes over a source's prompts", {"source/*/epochs": "*"}),
    Chart("Episodes", "mean per episode", {"environment/*": "*"},
          without="max_turns_frac tokens_mean"),
)
POLICY = (
    Chart("Entropy", "nats per token", {"policy/entropy": "of the distribution"},
          "A fall to nearly 0 ends exploration: all responses to a prompt are then alike."),
    Chart("Step of the policy", "KL per token, before to after", {"policy/approx_kl": "approx_kl"},
          "How far one iteration moves the policy from the one that sampled the responses."),
    Chart("KL to the reference", "per token",
          {"kl/mean": "in reward or advantage", "policy/kl_loss": "in the loss", "kl/coef": "coefficient"}),
    Chart("Clipped", "share of tokens",
          {"policy/clip_frac": "policy", "policy/dual_clip_frac": "policy, dual clip", "critic/clip_frac": "critic"}),
    Chart("Gradient norm", "before clipping", {"policy/grad_norm": "policy", "critic/grad_norm": "critic"}),
)
CRITIC = (
    Chart("Explained variance", "of the returns",
          {"critic/explained_variance": "all tokens", "critic/ev_at_0_25": "first quarter",
           "critic/ev_at_75_100": "last quarter"},
          "1 foresees every return, 0 is as good as a constant; below -1 is drawn at -1. Iterations up to 0 are value"
          " pretraining.", floor=-1.0),
    Chart("Error against the mean", "ratio of squared errors",
          {"critic/mse_vs_group": "all tokens, over the group's mean", "critic/mse_vs_group_first": "first state",
           "critic/mse_vs_batch": "all tokens, over the batch's mean",
           "critic/mse_vs_batch_first": "first state, batch"},
          "Above 1 the mean of the other responses is the better baseline."),
    Chart("Value and return", "mean", {"critic/value_mean": "value", "critic/return_mean": "return"},
          "Values that stay below a rising return are a critic that lags behind its policy."),
    Chart("Value loss", "",
          {"critic/loss": "loss", "critic/abs_error": "mean absolute error", "heldout/loss": "held-out pairs"}),
    Chart("Pairs", "share in which the better response scores higher",
          {"heldout/pair_accuracy": "held out", "critic/pair_accuracy": "training"}),
    Chart("Length-adaptive lambda", "of the policy's advantages",
          {"advantage/lambda_mean": "mean lambda", "advantage/lambda_at_min_frac": "share at algo.lambda_min"},
          "Responses at the lower bound are too short for the formula 1 - 1/(alpha l)."),
    Chart("Weight of the value", "in the baseline",
          {"advantage/tether_rho": "rho", "advantage/tether_rho_batch": "best of the batch",
           "advantage/control_variate_weight": "control variate"}),
)
ENGINES = (
    Chart("Gap between the log-probs", "trainer and rollout engine, per token",
          {"mismatch/logprob_gap_mean": "mean", "mismatch/logprob_gap_max": "largest", "mismatch/kl": "KL"},
          "The same weights in two engines: what is left is rounding (1e-5 nats in float32, up to 0.06 in bfloat16 or"
          " FP8), or a fault. With staleness it has what was learned since, too. A growing one often comes before a"
          " collapse of the reward: algo.mismatch.correction=mis leaves out the worst tokens."),
    Chart("Staleness", "updates between sampling and learning",
          {"rollout/staleness_mean": "mean", "rollout/staleness_max": "largest",
           "rollout/too_stale_frac": "share too stale", "rollout/mixed_frac": "share of several versions"}),
    Chart("Steps of a sync", "seconds", {"sync/seconds_*": "*"}, is_stack=True),
)
TIME_CHARTS = (
    Chart("Where the time goes", "seconds per iteration", {f"{TIME}*": "*"}, is_stack=True, without=" ".join(ONCE)),
    Chart("Waiting", "share of the iteration",
          {"derived/rollout_frac": "roles wait for responses",
           "derived/servers_idle_frac": "servers have no rollout"},
          "With rollout.max_staleness above 0 the servers also generate during the update."),
    Chart("Tokens per second", "", {"perf/tokens_per_second": "generated, over the whole iteration"}),
    Chart("Model FLOPs utilization (MFU) of the update", "share of the processors' peak", {MFU: "policy and critic"},
          "Operations of the models' forward and backward passes, over what the processors of policy and critic could"
          " do in the update's seconds: GPUs by their data sheet in bfloat16, a CPU as measured."),
)
# fmt: on


def name_metrics(chart: Chart, names: Iterable[str]) -> dict[str, str]:
    """(metric, label) of those of `names` that the chart shows, in its order; at most MOST_CURVES for a *."""
    found: dict[str, str] = {}
    known = list(names)
    for pattern, label in chart.metrics.items():
        start, star, end = pattern.partition("*")
        of_it = [each for each in known if (each.startswith(start) and each.endswith(end) if star else each == pattern)]
        rests = {name: name.removeprefix(start).removesuffix(end) for name in of_it}
        kept = [(name, rest) for name, rest in rests.items() if rest not in chart.without.split()]
        found |= {name: label.replace("*", rest) for name, rest in kept[:MOST_CURVES]}
    return found


@dataclass(frozen=True)
class Curve:
    label: str
    group: int
    """Number of its colour"""
    points: Sequence[tuple[float, float]]
    """(horizontal, vertical), finite; over iterations or anything else"""
    ranges: Sequence[tuple[float, float]] = ()
    """Least and largest value of what each point stands for; empty: the value itself"""
    run: str = ""
    """The run's name, by which a page of several finds all its elements; the label is its tooltip then"""


def build_curves(history: History, metrics: Mapping[str, str], *, is_stack: bool = False) -> list[Curve]:
    """One of each metric that has values. is_stack: means over all lines of a point, those without the metric as 0."""
    curves = []
    for number, (metric, label) in enumerate(metrics.items()):
        found = [(point, point.metrics[metric]) for point in history.points if metric in point.metrics]
        points = [(point.last, each.total / (point.num_lines if is_stack else each.count)) for point, each in found]
        ends = [(each.low, each.high) for _, each in found] if history.width > 1 else []
        if found:
            curves.append(Curve(label, min(number, GRAY), points, ends))
    return curves


def pile_up(curves: Sequence[Curve]) -> list[Curve]:
    """Each as the area between the sum of those before it and its own; a point that a curve lacks counts as 0."""
    level = dict.fromkeys(sorted({i for curve in curves for i, _ in curve.points}), 0.0)
    piled = []
    for curve in curves:
        own, below = dict(curve.points), list(level.values())
        level = {i: value + own.get(i, 0.0) for i, value in level.items()}
        piled.append(replace(curve, points=list(level.items()), ranges=list(zip(below, level.values(), strict=True))))
    return piled


WIDTH, HEIGHT = 340, 210
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 28
OUTLIER = 20.0
"""Times the median, from which a value makes a chart logarithmic"""
RANGE_SHARE = 0.95
"""Share of the points whose whole range is drawn; the others, spikes, are cut at the chart's edge"""
MOST_DOTS = 40
"""A curve of so few points has a dot at each"""


@dataclass(frozen=True)
class Axis:
    """A linear map from data to pixels."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def choose_ticks(self) -> list[float]:
        """Round values (1, 2 or 5 times a power of ten apart) within the axis."""
        raw = (self.high - self.low) / 4
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [0.0 if i == 0 else i * step for i in range(first, last + 1)]


def build_axis(values: Iterable[float], start: float, end: float, margin: float = 0.0) -> Axis:
    """An axis from the least to the greatest value, with a share `margin` of the range left free at each end."""
    low, high = min(found := list(values)), max(found)
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    room = (high - low) * margin
    return Axis(low - room, high + room, start, end)


def needs_log(values: Sequence[float]) -> bool:
    """Whether a few of the values, all above 0, are so large that the others would lie on the axis."""
    return min(values) > 0 and max(values) > OUTLIER * statistics.median(values)


def draw_curves(
    curves: Sequence[Curve],
    domain: tuple[float, float] | None = None,
    floor: float = -math.inf,
    *,
    is_stack: bool = False,
) -> str:
    """Lines with the range of what their points stand for, or areas upon one another (is_stack, of `pile_up`); a curve
    of one point is a dot; a vertical cursor.

    domain: the ends of x; None: those of the points. floor: values below are drawn there.
    """
    drawn = [curve for curve in curves if curve.points]
    values = [max(value, floor) for curve in drawn for _, value in curve.points]
    is_log, low = not is_stack and needs_log(values), min(values)

    def scale(value: float) -> float:
        return math.log10(max(value, low)) if is_log else max(value, floor)

    ends = [*values, *([0.0] if is_stack else _find_ends(drawn, floor))]
    # A share that is always 0 lies on the axis.
    ends += [] if any(ends) else [1.0]
    x = build_axis(domain or [across for curve in drawn for across, _ in curve.points], LEFT, WIDTH - RIGHT)
    y = build_axis([scale(value) for value in ends], HEIGHT - BOTTOM, TOP, margin=0.0 if is_stack else 0.04)

    def place(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(x.place(i), min(max(y.place(scale(value)), TOP), HEIGHT - BOTTOM)) for i, value in points]

    parts = list(_draw_grid(x, y, is_log))
    for curve in drawn:
        if curve.ranges:
            (lower, upper), across = zip(*curve.ranges, strict=True), [i for i, _ in curve.points]
            outline = [*place(zip(across, upper, strict=True)), *reversed(place(zip(across, lower, strict=True)))]
            parts.append(f'<polygon class="{"area" if is_stack else "range"} g{curve.group}" {_list(outline)}/>')
    for curve in () if is_stack else drawn:
        points = place(curve.points)
        tooltip = f' data-run="{escape(curve.run)}"><title>{escape(curve.label)}</title>' if curve.run else ">"
        parts.append(f'<g class="curve g{curve.group}"{tooltip}')
        if len(points) > 1:
            parts.append(f'<polyline class="hit" {_list(points)}/><polyline class="line" {_list(points)}/>')
        # A curve of many points has a dot at its end only.
        dots = points if len(points) <= MOST_DOTS and not curve.run else points[-1:]
        parts += [f'<circle class="end" cx="{across:.1f}" cy="{up:.1f}" r="2"/>' for across, up in dots]
        parts.append("</g>")
    parts.append(f'<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    return f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img">{"".join(parts)}</svg>'


def _find_ends(curves: Sequence[Curve], floor: float) -> Iterator[float]:
    """Lows and highs without the most extreme, so that one spike does not flatten the rest."""
    for ranges in (curve.ranges for curve in curves if curve.ranges):
        kept = math.ceil(RANGE_SHARE * len(ranges)) - 1
        yield max(sorted((low for low, _ in ranges), reverse=True)[kept], floor)
        yield max(sorted(high for _, high in ranges)[kept], floor)


def _draw_grid(x: Axis, y: Axis, is_log: bool) -> Iterator[str]:
    """The parts of a chart behind its curves. is_log: y is of decimal logarithms."""
    for tick in y.choose_ticks():
        at, value = y.place(tick), 10.0**tick if is_log else tick
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 6}" y="{at + 3.5:.1f}" text-anchor="end">{format_number(value)}</text>'
    for tick in x.choose_ticks():
        text = format_number(tick)
        yield f'<text class="tick" x="{x.place(tick):.1f}" y="{HEIGHT - 10}" text-anchor="middle">{text}</text>'
    yield f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'


def _list(points: Iterable[tuple[float, float]]) -> str:
    return f'points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"'


LOWEST = -1.0
"""Explained variance below it is drawn there, so that a few responses of one length do not hide the rest."""
Lines = Sequence[Mapping[str, float]]
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Picture:
    """A chart not over the iterations, but by position, length or value: most have a curve of each third of the run."""

    title: str
    x: str
    """What the horizontal axis is"""
    curves: Sequence[Curve]
    note: str = ""


QUARTER, QUARTILES = "quarter of the response", range(1, 5)


def list_critic_pictures(history: History) -> list[Picture]:
    lines = [line for line in history.lines if "critic/explained_variance" in line]
    baseline = "group" if any("critic/mse_vs_group" in line for line in lines) else "batch"
    without = _find_ratios(f"advantage/signal_frac_{baseline}", lines)
    gray = [Curve(f"outcome - mean of the {baseline}, whole run", GRAY, without)] if without else []
    by_position, by_length = [f"critic/ev_at_{q}" for q in QUARTERS], [f"critic/ev_length_q{n}" for n in QUARTILES]
    found = [
        Picture(
            "Explained variance by position",
            QUARTER,
            _draw_thirds(lines, partial(_find_medians, by_position, lowest=LOWEST)),
            "Rising: the critic learns from the response itself. Flat and high: it knows the prompt and little else."
            " Falling: it loses track as a response gets longer.",
        ),
        Picture(
            "Explained variance by length",
            "quartile of the responses' length",
            _draw_thirds(lines, partial(_find_medians, by_length, lowest=LOWEST)),
            "A quartile far below the others is a kind of response that the critic has not understood.",
        ),
        _build_calibration("first", lines),
        _build_calibration("middle", lines),
        Picture(
            "Signal-to-noise ratio of the advantages",
            QUARTER,
            [*_draw_thirds(lines, partial(_find_ratios, "advantage/signal_frac")), *gray],
            "How much of an advantage is about its own token; the gray line is what advantages without a critic would"
            " have.",
        ),
    ]
    return [picture for picture in found if any(curve.group != GRAY for curve in picture.curves)]


def list_gap_pictures(history: History) -> list[Picture]:
    curves = _draw_thirds(history.lines, partial(_find_medians, [f"mismatch/logprob_gap_at_{q}" for q in QUARTERS]))
    note = (
        "Rising to the right: errors that add up (a KV cache of lower precision, positions), or a policy that is less"
        " sure of its ends. High at the left: the prompts differ, or a cached prefix is of older weights."
    )
    return [Picture("Gap between the log-probs, by position", QUARTER, curves, note)] if curves else []


def _draw_thirds(lines: Lines, read: Callable[[Lines], Points]) -> list[Curve]:
    """A curve of what `read` finds in each third of the run."""
    curves = []
    for number in range(3):
        part = lines[len(lines) * number // 3 : len(lines) * (number + 1) // 3]
        if part and (points := read(part)):
            label = f"iterations {part[0]['iteration']:.0f} to {part[-1]['iteration']:.0f}"
            curves.append(Curve(label, number, points))
    return curves


def _find_medians(metrics: Sequence[str], lines: Lines, lowest: float = -math.inf) -> Points:
    """One point for each of the metrics that has values, from 1 on; what is below `lowest` is drawn there."""
    columns = enumerate(([line[metric] for line in lines if metric in line] for metric in metrics), start=1)
    return [(number, max(statistics.median(values), lowest)) for number, values in columns if values]


def _find_ratios(name: str, lines: Lines) -> Points:
    """(quarter, SNR) from the median share of signal; 0 where none is found, left out where no noise is."""
    shares = _find_medians([f"{name}_at_{quarter}" for quarter in QUARTERS], lines)
    return [(number, math.sqrt(max(x, 0.0) / (1 - x))) for number, x in shares if x < 1]


def _build_calibration(state: str, lines: Lines) -> Picture:
    def read(part: Lines) -> Points:
        names = [[f"critic/{what}_{state}_q{n}" for n in QUARTILES] for what in ("value", "outcome")]
        values, outcomes = (dict(_find_medians(each, part)) for each in names)
        return [(value, outcomes[number]) for number, value in values.items() if number in outcomes]

    curves = _draw_thirds(lines, read)
    if values := [x for curve in curves for x, _ in curve.points]:
        curves.append(Curve("perfectly calibrated", GRAY, [(x, x) for x in (min(values), max(values))]))
    note = "On the gray line the critic promises what comes; above it, it lags behind a policy that gets better;"
    note += " flatter than it, its values vary too much."
    return Picture(f"Calibration of the value of the {state} state", "mean value; vertical: mean outcome", curves, note)
