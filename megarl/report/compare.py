"""The page of several runs, a sweep's or any named ones: what differs between them, their curves over one another, and
the effect of each difference with its spread over seeds.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from megarl.report.charts import NUM_COLOURS, Curve, draw_curves, needs_log
from megarl.report.page import format_problems, format_table, format_tiles, wrap_page
from megarl.report.record import HELDOUT, RunRecord, State
from megarl.report.text import format_number, format_seconds

SEED = "seed"
BOOKKEEPING = ("cluster.", "logger.", "checkpoint.", "evaluate.")
"""Prefixes of keys that have no effect on what a run learns"""
ABSENT, OTHERS = "—", "others"
CHARTS = (
    (HELDOUT, "Held-out reward", "greedy"),
    ("reward/mean", "Training reward", "sampled"),
    ("length/mean", "Response length", "tokens"),
    ("critic/loss", "Value loss", ""),
    ("critic/explained_variance", "Explained variance", "of the critic"),
    ("policy/clip_frac", "Clipped", "share of tokens"),
    ("policy/entropy", "Entropy", "of the policy"),
    ("policy/approx_kl", "Step of the policy", "KL, before to after"),
    ("policy/grad_norm", "Gradient norm", "policy"),
    ("mismatch/kl", "Mismatch", "KL to the rollout engine"),
    ("perf/time_per_step", "Seconds per iteration", "all phases"),
)
"""(metric, title, unit) of each chart; those that some run has are drawn"""


@dataclass(frozen=True)
class Level:
    """One value of a parameter."""

    value: str
    points: tuple[float, ...]
    """The metric of every run with this value, in the runs' order"""
    mean: float
    """Mean over the settings of the other parameters, each the mean of its seeds"""
    seed_std: float | None
    """Standard deviation over seeds within a setting, pooled over the settings; None where none has two seeds"""


@dataclass(frozen=True)
class Effect:
    key: str
    levels: tuple[Level, ...]

    @property
    def range(self) -> float:
        """The difference between the best and the worst mean."""
        means = [level.mean for level in self.levels]
        return max(means) - min(means)


def find_parameters(runs: Sequence[RunRecord]) -> list[str]:
    """The keys whose values differ between the runs, those of the command line first, the seed last.

    A key whose value follows from another one's (such as those that a preset sets with algo.name) is left out, unless
    the command line set it.
    """
    known = [run for run in runs if run.config]
    keys = [key for key in known[0].config if all(key in run.config for run in known)] if known else []
    columns = {key: [get_value(run, key) for run in known] for key in keys if not key.startswith(BOOKKEEPING)}
    differing = [key for key, column in columns.items() if len(set(column)) > 1]
    given = {text.lstrip("+").split("=", 1)[0] for run in known for text in run.overrides}
    asked = [key for key in differing if key in given]
    found = list(asked)
    for key in sorted((key for key in differing if key not in given), key=lambda key: key != "algo.name"):
        # It follows from another one where each value of that one stands with one of its own.
        pairs = [(columns[other], set(zip(columns[other], columns[key], strict=True))) for other in found]
        if not any(len(both) == len(set(values)) for values, both in pairs):
            found.append(key)
    return sorted(found, key=lambda key: (key == SEED, key not in asked, differing.index(key)))


def get_value(run: RunRecord, key: str) -> str:
    """As it would be typed on a command line."""
    value = run.config.get(key, ABSENT)
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def compute_effects(runs: Sequence[RunRecord], parameters: Sequence[str], scores: Mapping[str, float]) -> list[Effect]:
    """The effect of each parameter other than the seed; largest range first.

    scores: the metric by run name; runs without one are left out. A setting is one combination of the parameters other
    than the seed; every setting has the same weight, however many seeds it has.
    """
    settings: dict[tuple[str, ...], list[float]] = {}
    varied = [key for key in parameters if key != SEED]
    counted = [run for run in runs if run.name in scores]
    for run in counted:
        settings.setdefault(tuple(get_value(run, key) for key in varied), []).append(scores[run.name])
    effects = []
    for position, key in enumerate(varied):
        levels = []
        for value in sort_values({setting[position] for setting in settings}):
            groups = [points for setting, points in settings.items() if setting[position] == value]
            several = [points for points in groups if len(points) > 1]
            freedom = sum(len(points) - 1 for points in several)
            squares = sum((len(points) - 1) * statistics.variance(points) for points in several)
            points = tuple(scores[run.name] for run in counted if get_value(run, key) == value)
            mean = statistics.mean(statistics.mean(points) for points in groups)
            levels.append(Level(value, points, mean, (squares / freedom) ** 0.5 if freedom else None))
        if len(levels) > 1:
            effects.append(Effect(key, tuple(levels)))
    return sorted(effects, key=lambda effect: -effect.range)


def sort_values(values: set[str]) -> list[str]:
    """The values sorted: numbers by size, then words."""

    def rank(text: str) -> tuple[bool, float, str]:
        try:
            return False, float(text), ""
        except ValueError:
            return True, 0.0, text

    return sorted(values, key=rank)


def is_complete_grid(runs: Sequence[RunRecord], parameters: Sequence[str]) -> bool:
    """Whether every combination of the values was run; otherwise an effect may be another parameter's."""
    combinations = {tuple(get_value(run, key) for key in parameters) for run in runs}
    return len(combinations) == math.prod(len(set(column)) for column in zip(*combinations, strict=True))


def color_runs(runs: Sequence[RunRecord], key: str) -> tuple[list[str], dict[str, int]]:
    """The values of a parameter (NUM_COLOURS at most, then all others) and the number of each run's, by its name."""
    values = sort_values({get_value(run, key) for run in runs})
    if len(values) > NUM_COLOURS:
        values = [*values[:NUM_COLOURS], OTHERS]
    number = {value: i for i, value in enumerate(values)}
    return values, {run.name: number.get(get_value(run, key), NUM_COLOURS) for run in runs}


def format_comparison(title: str, runs: Sequence[RunRecord]) -> str:
    """The whole page."""
    parameters = find_parameters(runs)
    done = [run for run in runs if run.state == State.done.value and HELDOUT in run.history.last]
    scores = {run.name: run.history.last[HELDOUT] for run in done}
    effects = compute_effects(runs, parameters, scores)
    order = [effect.key for effect in effects] + [key for key in parameters if key == SEED]
    columns = sorted(dict.fromkeys([*order, *parameters]), key=lambda key: key == SEED)
    key = [*order, *parameters, ""][0]
    values, group_of = color_runs(runs, key)
    ranked = sorted(runs, key=lambda run: (run.name not in scores, -scores.get(run.name, 0.0), run.name))
    body = [
        *_format_head(title, runs, scores),
        *_format_runs(ranked, columns, scores, group_of),
        *_format_curves(ranked, key, values, group_of, parameters),
        *_format_effects(effects, done, parameters),
        *_format_failures([run for run in runs if run.state != State.done.value]),
        *format_problems([problem for run in runs for problem in run.problems]),
    ]
    folders = " ".join(f"<code>{escape(str(run.directory))}</code>" for run in runs[:2])
    more = f" and {len(runs) - 2} more" if len(runs) > 2 else ""
    return wrap_page(title, "", body, f"Written by megarl report from {folders}{more}", None, "compare.js")


def _format_failures(failed: Sequence[RunRecord]) -> Iterator[str]:
    if failed:
        yield "<h2>Not done, and why</h2>"
        whys = [f'<td class="wide">{escape(run.why)}</td>'.replace("\n", "<br>") for run in failed]
        names = [f"<td><code>{escape(run.name)}</code></td>" for run in failed]
        yield format_table(("run", "state", "why"), list(zip(names, map(_format_state, failed), whys, strict=True)))


def _format_state(run: RunRecord) -> str:
    return f'<td class="{escape(run.state)}">{escape(run.state)}</td>'


def _format_head(title: str, runs: Sequence[RunRecord], scores: Mapping[str, float]) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1>"
    given = [set(run.overrides) for run in runs if run.overrides]
    if shared := sorted(set.intersection(*given)) if given else []:
        yield f"<p>In all runs: <code>{escape(' '.join(shared))}</code></p>"
    states = [run.state for run in runs]
    tiles = {"runs done": f"{states.count(State.done.value)} of {len(runs)}"}
    tiles |= {state: str(states.count(state)) for state in dict.fromkeys(states) if state != State.done.value}
    if scores:
        tiles |= {"best held-out reward, at the end": f"{max(scores.values()):.3f}"}
        tiles |= {"worst of a run that is done": f"{min(scores.values()):.3f}"}
    yield format_tiles(tiles | {"of training, all runs": format_seconds(sum(run.history.seconds for run in runs))})


def _format_runs(
    runs: Sequence[RunRecord], parameters: Sequence[str], scores: Mapping[str, float], group_of: Mapping[str, int]
) -> Iterator[str]:
    yield "<h2>Runs</h2><p>Only what differs; the best at the end first.</p>"
    yield '<div class="scroll"><table><thead><tr><th></th>'
    yield from (f"<th>{escape(key.rsplit('.', 1)[-1])}<br><small>{escape(key)}</small></th>" for key in parameters)
    numbers = ("held-out, end", "held-out, best", "training reward", "length", "iterations", "time")
    yield "<th>state</th>" + "".join(f'<th class="number">{name}</th>' for name in numbers) + "<th>folder</th>"
    yield "</tr></thead><tbody>"
    top = max([abs(score) for score in scores.values()], default=0.0)
    for run in runs:
        last, end = run.history.last, run.history.last.get(HELDOUT)
        best = run.history.best[HELDOUT][0] if end is not None else None
        share = 100 * max(0.0, end) / top if end is not None and top else 0
        yield f'<tr data-run="{escape(run.name)}" class="g{group_of[run.name]}">'
        yield '<td><i class="swatch"></i></td>'
        yield from (f"<td>{escape(get_value(run, key))}</td>" for key in parameters)
        yield _format_state(run)
        yield f'<td class="number">{_show(end)}<i class="bar"><i style="width:{min(share, 100):.0f}%"></i></i></td>'
        shown = [_show(value) for value in (best, last.get("reward/mean"), last.get("length/mean"))]
        shown += [str(run.history.num_iterations), format_seconds(run.history.seconds)]
        yield from (f'<td class="number">{each}</td>' for each in shown)
        yield f"<td><code>{escape(run.name)}</code></td></tr>"
    yield "</tbody></table></div>"


def _show(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if abs(value) < 10 else format_number(value)


def _format_curves(
    runs: Sequence[RunRecord], key: str, values: Sequence[str], group_of: Mapping[str, int], parameters: Sequence[str]
) -> Iterator[str]:
    """group_of: the number of each run's colour, that of its value of the key."""
    yield "<h2>Curves</h2>"
    yield "<p>Every run, over the iterations. Point at a line or a row of the table to follow one run.</p>"
    swatches = (f'<span><i class="swatch g{i}"></i>{escape(value)}</span>' for i, value in enumerate(values))
    yield f'<div class="legend"><code>{escape(key)}</code>{"".join(swatches)}</div>'
    yield '<div class="grid-of-charts">'
    for metric, title, unit in CHARTS:
        curves = []
        for run in runs:
            points = [(line["iteration"], line[metric]) for line in run.history.lines if metric in line]
            if points:
                setting = ", ".join(f"{each}={get_value(run, each)}" for each in parameters) or run.name
                label = f"{setting}: {format_number(points[-1][1])} at iteration {points[-1][0]}"
                curves.append(Curve(label, group_of[run.name], points, run=run.name))
        if curves:
            is_log = needs_log([value for curve in curves for _, value in curve.points])
            shown = escape(f"{unit} (log scale)".strip() if is_log else unit)
            yield f'<div class="card"><h3>{title} <span>{shown}</span><small>{metric}</small></h3>'
            yield f"{draw_curves(curves)}</div>"
    yield "</div>"


def _format_effects(effects: Sequence[Effect], done: Sequence[RunRecord], parameters: Sequence[str]) -> Iterator[str]:
    """done: the runs that count."""
    if not effects:
        return
    yield "<h2>Effect of each parameter</h2>"
    levels = [level for effect in effects for level in effect.levels]
    spread = "Every setting has one seed, so that the share of chance in this is unknown."
    if any(level.seed_std is not None for level in levels):
        seeds = len({get_value(run, SEED) for run in done})
        spread = f"± is one standard deviation over the {seeds} seeds, within a setting of the other parameters."
    yield f"<p>Held-out reward at the end; a mean is over the settings of the other parameters. {spread}</p>"
    if not is_complete_grid(done, parameters):
        yield "<p>Not every combination is done: a mean may carry the effect of another parameter.</p>"
    yield '<div class="grid-of-charts effects">'
    heads = ("value", "runs", "mean", "± seeds", "lowest … highest")
    for effect in effects:
        rows = []
        for level in effect.levels:
            std = "" if level.seed_std is None else f"{level.seed_std:.3f}"
            ends = f"{min(level.points):.3f} … {max(level.points):.3f}"
            rows.append((level.value, str(len(level.points)), f"{level.mean:.3f}", std, ends))
        table = format_table(heads, [[f'<td class="number">{escape(cell)}</td>' for cell in row] for row in rows])
        yield f'<div class="card"><h3><code>{escape(effect.key)}</code></h3>{table}</div>'
    yield "</div>"
