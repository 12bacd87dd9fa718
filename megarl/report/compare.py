"""The page of several runs, a sweep's or any named ones: what differs between them, their curves over one another, and
the spread of each setting over its seeds.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
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


def find_parameters(runs: Sequence[RunRecord]) -> list[str]:
    """The keys whose values differ between the runs and that their command lines give differently, the seed last.

    The name of a preset stands for what it sets. With different experiments all keys that differ count.
    """
    known = [run for run in runs if run.config]
    keys = [key for key in known[0].config if all(key in run.config for run in known)] if known else []
    keys = [key for key in keys if not key.startswith(BOOKKEEPING) and len({get_value(run, key) for run in known}) > 1]
    given = [set(run.overrides) for run in known]
    shared = set.intersection(*given) if given else set()
    varied = {text.lstrip("+").split("=", 1)[0] for each in given for text in each - shared}
    asked = [key for key in keys if "experiment" in varied or {key, key.removesuffix(".name")} & varied]
    return sorted(asked, key=lambda key: key == SEED)


def get_value(run: RunRecord, key: str) -> str:
    """As it would be typed on a command line."""
    value = run.config.get(key, ABSENT)
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def group_settings(
    runs: Sequence[RunRecord], parameters: Sequence[str], scores: Mapping[str, float]
) -> dict[tuple[str, ...], list[float]]:
    """The scores of each combination of the parameters other than the seed, the best mean first.

    scores: the metric by run name; runs without one are left out.
    """
    settings: dict[tuple[str, ...], list[float]] = {}
    for run in (run for run in runs if run.name in scores):
        setting = tuple(get_value(run, key) for key in parameters if key != SEED)
        settings.setdefault(setting, []).append(scores[run.name])
    return dict(sorted(settings.items(), key=lambda each: -statistics.mean(each[1])))


def sort_values(values: set[str]) -> list[str]:
    """The values sorted: numbers by size, then words."""

    def rank(text: str) -> tuple[bool, float, str]:
        try:
            return False, float(text), ""
        except ValueError:
            return True, 0.0, text

    return sorted(values, key=rank)


def format_comparison(title: str, runs: Sequence[RunRecord]) -> str:
    """The whole page."""
    parameters = find_parameters(runs)
    done = [run for run in runs if run.state == State.done.value and HELDOUT in run.history.last]
    scores = {run.name: run.history.last[HELDOUT] for run in done}
    key = [*parameters, ""][0]
    values = sort_values({get_value(run, key) for run in runs})
    values = values if len(values) <= NUM_COLOURS else [*values[:NUM_COLOURS], OTHERS]
    number = {value: i for i, value in enumerate(values)}
    group_of = {run.name: number.get(get_value(run, key), NUM_COLOURS) for run in runs}
    ranked = sorted(runs, key=lambda run: (run.name not in scores, -scores.get(run.name, 0.0), run.name))
    swatches = (f'<span><i class="swatch g{i}"></i>{escape(value)}</span>' for i, value in enumerate(values))
    body = [
        *_format_head(title, runs, scores),
        *_format_runs(ranked, parameters, group_of),
        "<h2>Curves</h2>",
        "<p>Every run, over the iterations. Point at a line or a row of the table to follow one run.</p>",
        f'<div class="legend"><code>{escape(key)}</code>{"".join(swatches)}</div>',
        *_format_curves(ranked, group_of, parameters),
        *_format_settings(group_settings(runs, parameters, scores), parameters),
        *format_problems([problem for run in runs for problem in run.problems]),
    ]
    return wrap_page(title, "", body, f"Written by megarl report from {len(runs)} runs", None, "compare.js")


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
    yield format_tiles(tiles | {"of training, all runs": format_seconds(sum(run.history.seconds for run in runs))})


def _format_runs(runs: Sequence[RunRecord], parameters: Sequence[str], group_of: Mapping[str, int]) -> Iterator[str]:
    """group_of: the number of each run's colour."""
    yield "<h2>Runs</h2><p>Only what differs; the best at the end first.</p>"
    numbers = ("held-out, end", "held-out, best", "training reward", "length", "iterations", "time")
    rows = []
    for run in runs:
        last = run.history.last
        best = run.history.best[HELDOUT][0] if HELDOUT in last else None
        shown = [_show(value) for value in (last.get(HELDOUT), best, last.get("reward/mean"), last.get("length/mean"))]
        shown += [str(run.history.num_iterations), format_seconds(run.history.seconds)]
        name = f'<td data-run="{escape(run.name)}" class="g{group_of[run.name]}"><i class="swatch"></i>'
        state = f'<td class="{escape(run.state)}">{escape(run.state)}</td>'
        cells = [f"{name}<code>{escape(run.name)}</code></td>", state]
        cells += [f"<td>{escape(get_value(run, key))}</td>" for key in parameters]
        why = f'<td class="wide">{escape(run.why)}</td>'.replace("\n", "<br>")
        rows.append([*cells, *(f'<td class="number">{each}</td>' for each in shown), why])
    yield format_table(("run", "state", *parameters, *numbers, "why it is not done"), rows)


def _show(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if abs(value) < 10 else format_number(value)


def _format_curves(runs: Sequence[RunRecord], group_of: Mapping[str, int], parameters: Sequence[str]) -> Iterator[str]:
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


def _format_settings(settings: Mapping[tuple[str, ...], list[float]], parameters: Sequence[str]) -> Iterator[str]:
    if not any(len(points) > 1 for points in settings.values()):
        return
    yield "<h2>Over the seeds</h2>"
    yield "<p>Held-out reward at the end; ± is one standard deviation over the seeds of a setting.</p>"
    rows = []
    for setting, points in settings.items():
        std = f"{statistics.stdev(points):.3f}" if len(points) > 1 else ""
        numbers = (str(len(points)), f"{statistics.mean(points):.3f}", std, f"{min(points):.3f}", f"{max(points):.3f}")
        rows.append([f'<td class="number">{escape(cell)}</td>' for cell in (*setting, *numbers)])
    heads = [key for key in parameters if key != SEED]
    yield format_table((*heads, "runs", "mean", "± seeds", "lowest", "highest"), rows)
