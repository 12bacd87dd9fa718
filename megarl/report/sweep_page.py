"""The page of a sweep: one self-contained HTML file, built from what the runs wrote."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from megarl.report.compare import (
    SEED,
    Effect,
    compute_effects,
    find_parameters,
    get_value,
    is_complete_grid,
    sort_values,
)
from megarl.report.svg import Curve, build_effect_axis, draw_effect, draw_lines, needs_log
from megarl.report.sweep import HELDOUT, RunRecord, Sweep
from megarl.report.text import format_number, format_seconds

HERE = Path(__file__).resolve().parent
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
)
"""(metric, title, unit) of each chart; those that some run has are drawn"""
NUM_COLOURS = 8
OTHERS = "others"
LONGEST_NAME = 24


@dataclass(frozen=True)
class Coloring:
    """Runs grouped by the value of one parameter, in at most NUM_COLOURS groups; the last one has all others."""

    key: str
    values: tuple[str, ...]
    group_of: Mapping[str, int]
    """Number of the colour of each run, by its name"""


def format_page(sweep: Sweep) -> str:
    """The whole page."""
    parameters = find_parameters(sweep.runs)
    scores = {run.name: score for run in sweep.runs if (score := run.last(HELDOUT)) is not None and run.state == "done"}
    effects = compute_effects(sweep.runs, parameters, scores)
    order = [effect.key for effect in effects] + [key for key in parameters if key == SEED]
    columns = [*order, *(key for key in parameters if key not in order and key != SEED)]
    columns.sort(key=lambda key: key == SEED)
    colorings = [color_runs(sweep.runs, key) for key in order or parameters[:1]] or [color_runs(sweep.runs, "")]
    ranked = sorted(sweep.runs, key=lambda run: (run.name not in scores, -scores.get(run.name, 0.0), run.name))
    body = [
        *_format_head(sweep, scores),
        *_format_runs(ranked, columns, scores, colorings[0]),
        *_format_curves(ranked, colorings, parameters),
        *_format_effects(effects, sweep.runs, parameters, scores),
        *_format_failures(sweep),
        *_format_problems(sweep),
    ]
    groups = json.dumps([coloring.group_of for coloring in colorings]).replace("<", "\\u003c")
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(sweep.directory.name)}</title><style>{(HERE / 'sweep.css').read_text()}</style></head>",
            "<body><main>",
            *body,
            f"<footer>Written by tools/report.py from <code>{escape(str(sweep.directory))}</code></footer></main>",
            f'<script type="application/json" id="groups">{groups}</script>',
            f"<script>{(HERE / 'sweep.js').read_text()}</script></body></html>\n",
        ]
    )


def color_runs(runs: Sequence[RunRecord], key: str) -> Coloring:
    values = sort_values({get_value(run, key) for run in runs})
    if len(values) > NUM_COLOURS:
        values = [*values[:NUM_COLOURS], OTHERS]
    number = {value: i for i, value in enumerate(values)}
    return Coloring(key, tuple(values), {run.name: number.get(get_value(run, key), NUM_COLOURS) for run in runs})


def name_setting(run: RunRecord, parameters: Sequence[str]) -> str:
    """A name that tells the run apart for a reader."""
    return ", ".join(f"{key}={get_value(run, key)}" for key in parameters) or run.name


def _format_head(sweep: Sweep, scores: Mapping[str, float]) -> Iterator[str]:
    yield f"<h1>Sweep {escape(sweep.directory.name)}</h1>"
    given = [set(run.overrides) for run in sweep.runs if run.overrides]
    shared = sorted(text for text in set.intersection(*given) if "taken_from" not in text) if given else []
    if shared:
        yield f"<p>In all runs: <code>{escape(' '.join(shared))}</code></p>"
    count = {
        state: sum(run.state == state for run in sweep.runs) for state in ("done", "failed", "stopped", "unfinished")
    }
    tiles = [(f"{count['done']} of {len(sweep.runs)}", "runs done")]
    tiles += [(str(number), state) for state, number in count.items() if number and state != "done"]
    if scores:
        best = max(scores.values())
        tiles += [(f"{best:.3f}", "best held-out reward, at the end")]
        tiles += [(f"{min(scores.values()):.3f}", "worst of a run that is done")]
    tiles += [(format_seconds(sum(run.seconds for run in sweep.runs)), "of training, all runs")]
    yield '<div class="tiles">'
    yield from (f'<div class="tile"><b>{escape(number)}</b><span>{escape(text)}</span></div>' for number, text in tiles)
    yield "</div>"


def _format_curves(
    runs: Sequence[RunRecord], colorings: Sequence[Coloring], parameters: Sequence[str]
) -> Iterator[str]:
    yield "<h2>Curves</h2>"
    yield "<p>Every run, over the iterations. Point at a line or a row of the table to follow one run.</p>"
    if len(colorings) > 1:
        yield '<div class="legend">Colour by'
        for number, coloring in enumerate(colorings):
            key, pressed = escape(coloring.key), "true" if number == 0 else "false"
            yield f'<button data-colour="{number}" aria-pressed="{pressed}"><code>{key}</code></button>'
        yield "</div>"
    for number, coloring in enumerate(colorings):
        hidden = " hidden" if number else ""
        yield f'<div class="legend" data-legend="{number}"{hidden}><code>{escape(coloring.key)}</code>'
        for group, value in enumerate(coloring.values):
            yield f'<span><i class="swatch g{group}"></i>{escape(value)}</span>'
        yield "</div>"
    yield '<div class="grid-of-charts">'
    for metric, title, unit in CHARTS:
        yield from _format_chart(runs, colorings[0], parameters, metric, title, unit)
    yield "</div>"


def _format_chart(
    runs: Sequence[RunRecord], coloring: Coloring, parameters: Sequence[str], metric: str, title: str, unit: str
) -> Iterator[str]:
    curves = []
    for run in runs:
        lines = [line for line in run.lines if metric in line]
        points = [(line["iteration"], line[metric]) for line in lines]
        if points:
            label = f"{name_setting(run, parameters)}: {format_number(points[-1][1])} at iteration {points[-1][0]}"
            curves.append(Curve(run.name, label, coloring.group_of[run.name], points))
    if curves:
        if needs_log([value for curve in curves for _, value in curve.points]):
            unit = f"{unit} (log scale)".strip()
        yield f'<div class="card"><h3>{escape(title)} <span>{escape(unit)}</span><small>{escape(metric)}</small></h3>'
        yield draw_lines(curves)
        yield "</div>"


def _format_effects(
    effects: Sequence[Effect], runs: Sequence[RunRecord], parameters: Sequence[str], scores: Mapping[str, float]
) -> Iterator[str]:
    if not effects:
        return
    yield "<h2>Effect of each parameter</h2>"
    seeds = len({get_value(run, SEED) for run in runs if run.name in scores})
    spread = (
        f"The band is one standard deviation over the {seeds} seeds, within a setting of the other parameters."
        if any(level.seed_std is not None for effect in effects for level in effect.levels)
        else "Every setting has one seed, so that the share of chance in this is unknown."
    )
    yield (
        "<p>Held-out reward at the end. A dot is a run that is done; the bar is the mean over the settings of the other"
        f" parameters. {escape(spread)}</p>"
    )
    if not is_complete_grid([run for run in runs if run.name in scores], parameters):
        yield "<p>Not every combination is done: a mean may carry the effect of another parameter.</p>"
    axis = build_effect_axis(effects)
    yield '<div class="grid-of-charts effects">'
    for effect in effects:
        yield f'<div class="card"><h3><code>{escape(effect.key)}</code></h3>{draw_effect(effect, axis)}'
        yield '<table><thead><tr><th>value</th><th class="number">runs</th><th class="number">mean</th>'
        yield '<th class="number">± seeds</th><th class="number">lowest … highest</th></tr></thead><tbody>'
        for level in effect.levels:
            std = "" if level.seed_std is None else f"{level.seed_std:.3f}"
            yield (
                f'<tr><td>{escape(level.value)}</td><td class="number">{len(level.points)}</td>'
                f'<td class="number">{level.mean:.3f}</td><td class="number">{std}</td>'
                f'<td class="number">{min(level.points):.3f} … {max(level.points):.3f}</td></tr>'
            )
        yield "</tbody></table></div>"
    yield "</div>"


def _format_runs(
    runs: Sequence[RunRecord], parameters: Sequence[str], scores: Mapping[str, float], coloring: Coloring
) -> Iterator[str]:
    yield "<h2>Runs</h2><p>Only what differs; the best at the end first.</p>"
    yield '<div class="scroll"><table><thead><tr><th></th>'
    yield from (f"<th>{escape(key.rsplit('.', 1)[-1])}<br><small>{escape(key)}</small></th>" for key in parameters)
    numbers = ("held-out, end", "held-out, best", "training reward", "length", "iterations", "time")
    yield "<th>state</th>" + "".join(f'<th class="number">{name}</th>' for name in numbers) + "<th>folder</th>"
    yield "</tr></thead><tbody>"
    top = max([abs(score) for score in scores.values()], default=0.0)
    for run in runs:
        yield f'<tr data-run="{escape(run.name)}" class="g{coloring.group_of[run.name]}">'
        yield '<td><i class="swatch"></i></td>'
        yield from (f"<td>{escape(get_value(run, key))}</td>" for key in parameters)
        yield f'<td class="{escape(run.state)}">{escape(run.state)}</td>'
        end = run.last(HELDOUT)
        share = 100 * max(0.0, end) / top if end is not None and top else 0
        yield f'<td class="number">{_show(end)}<i class="bar"><i style="width:{min(share, 100):.0f}%"></i></i></td>'
        for value in (run.best(HELDOUT), run.last("reward/mean"), run.last("length/mean")):
            yield f'<td class="number">{_show(value)}</td>'
        yield f'<td class="number">{run.num_iterations}</td><td class="number">{format_seconds(run.seconds)}</td>'
        yield f'<td title="{escape(run.name)}"><code>{escape(_shorten_name(run.name))}</code></td></tr>'
    yield "</tbody></table></div>"


def _format_failures(sweep: Sweep) -> Iterator[str]:
    failed = [run for run in sweep.runs if run.state != "done"]
    if not failed:
        return
    yield "<h2>Not done, and why</h2>"
    yield '<div class="scroll"><table><thead><tr><th>run</th><th>state</th><th>why</th></tr></thead><tbody>'
    for run in failed:
        why = escape(run.why).replace("\n", "<br>")
        yield f'<tr><td><code>{escape(run.name)}</code></td><td class="{escape(run.state)}">{escape(run.state)}</td>'
        yield f'<td class="wide">{why}</td></tr>'
    yield "</tbody></table></div>"


def _format_problems(sweep: Sweep) -> Iterator[str]:
    problems = [problem for run in sweep.runs for problem in run.problems]
    if problems:
        yield "<h2>Files that are missing or damaged</h2><ul>"
        yield from (f"<li><code>{escape(problem)}</code></li>" for problem in problems)
        yield "</ul>"


def _shorten_name(name: str) -> str:
    """The name without its values, which the table shows in columns; its last digits identify it."""
    return name if len(name) <= LONGEST_NAME else f"…{name[-8:]}"


def _show(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if abs(value) < 10 else format_number(value)
