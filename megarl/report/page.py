"""The page of a run: one self-contained HTML file, built from what the run wrote, while it trains or after; and that of
several runs, a sweep's or any named ones: what differs, their curves over one another, the spread over the seeds.
"""

import json
import re
import shlex
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from megarl.report import charts
from megarl.report.record import HELDOUT, SECONDS, UNFINISHED, History, RunRecord, Start, State
from megarl.report.signs import NUM_RULES, list_warnings
from megarl.report.text import LOG_NAME, format_number, format_seconds, shorten
from megarl.report.tokens import TOKENS_FILE, Record, load_records

STYLE, SCRIPT = (Path(__file__).with_name(f"page.{kind}") for kind in ("css", "js"))
VIEWER_BYTES = 4_000_000
"""Most bytes of responses"""
LONGEST_VALUE = 300
WARNING = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d )?warning: (.*)")
"""A line of train.log, with or without its time"""


SEARCH_PATH = re.compile(r"hydra\.searchpath=\[('file://[^'\\]+',?)+\]")
DIRECTORY = re.compile(r"file://([^']+)")
Changes = tuple[Sequence[str], Mapping[str, tuple[Any, Any]]]
"""The options of groups that a run chose, and (their value, the run's) of each key that differs"""
SEED = "seed"
BOOKKEEPING = ("cluster.", "logger.", "checkpoint.", "evaluate.")
"""Prefixes of keys that have no effect on what a run learns"""
ABSENT, OTHERS = "—", "others"
NO_CHARTS = {"iterations": [], "domain": [0, 1], "charts": []}
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
ABOVE_0, BELOW_1 = ((lambda value: value > 0), "above 0"), ((lambda value: value < 1), "below 1")
CRITIC_SIGNS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    **dict.fromkeys(("critic/explained_variance", "critic/calibration_corr_middle"), ABOVE_0),
    **dict.fromkeys(("critic/mse_vs_group", "critic/mse_vs_group_first"), BELOW_1),
}
"""Metrics of a critic that helps, what they then are, and that in words"""


def format_run_page(run: RunRecord, changes: Changes = ((), {})) -> str:
    """The whole page."""
    drawn, records, history = _Charts(run.history), load_records(run.directory, VIEWER_BYTES), run.history
    viewer = format_viewer(records)
    body = [
        *_format_head(run),
        *_format_warnings(run),
        *drawn.format_section("Learning", charts.LEARNING),
        *drawn.format_section("Policy", charts.POLICY),
        *drawn.format_section("Critic", charts.CRITIC, charts.list_critic_pictures(history)),
        *_format_critic(history),
        *drawn.format_section("Trainer and rollout engine", charts.ENGINES, charts.list_gap_pictures(history)),
        *drawn.format_section("Time", charts.TIME_CHARTS),
        *_format_configuration(run, changes),
        *([f'<h2 id="responses">Responses</h2>{viewer}'] if viewer else []),
        *format_problems(run.problems),
    ]
    heads = [line for line in body if line.startswith('<h2 id="')]
    links = [re.sub(r'<h2 id="(.*?)">(.*?)<.*', r'<a href="#\1">\2</a>', head, flags=re.DOTALL) for head in heads]
    footer = f"Written by megarl report from <code>{escape(str(run.directory))}</code>"
    return wrap_page(run.name, f"<nav>{''.join(links)}</nav>", body, footer, drawn.data)


def wrap_page(title: str, nav: str, body: Sequence[str], footer: str, data: Any) -> str:
    """A page with its style and script. data: for the charts that the script reads."""
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{STYLE.read_text()}</style></head><body>{nav}<main>",
            *body,
            f"<footer>{footer}</footer></main>",
            f'<script type="application/json" id="data">{dump_for_script(data)}</script>',
            # A module: its names are its own.
            f'<script type="module">{SCRIPT.read_text()}</script></body></html>\n',
        ]
    )


def format_tiles(tiles: Mapping[str, str]) -> str:
    """Numbers by what they are."""
    shown = "".join(
        f'<div class="tile"><b>{escape(number)}</b><span>{escape(what)}</span></div>' for what, number in tiles.items()
    )
    return f'<div class="tiles">{shown}</div>'


def format_problems(problems: Sequence[str]) -> Iterator[str]:
    if problems:
        yield '<h2 id="files">Files that are missing or damaged</h2><ul>'
        yield from (f"<li><code>{escape(problem)}</code></li>" for problem in problems)
        yield "</ul>"


def format_table(heads: Sequence[str], rows: Sequence[Sequence[str]], style: str = "") -> str:
    """heads: texts; rows: of cells with their <td>."""
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    return f'<div class="scroll"><table{style}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def format_viewer(records: Sequence[Record]) -> str:
    """The section; "" where there is nothing to show."""
    if not records:
        return ""
    return f"""<section class="viewer">
<p><code>{TOKENS_FILE}</code> has a few responses of each iteration and of each evaluation, token by token
(<code>logger.num_token_records</code>). Those shown here are spread evenly over the run.</p>
<div class="rv-controls"><span data-rv="outcome"></span><span data-rv="kind"></span>
<label>colour <select data-rv="field"></select></label>
<input data-rv="query" type="search" placeholder="search prompts and responses" aria-label="search the responses">
<span data-rv="count"></span></div>
<div class="rv-panes"><div class="rv-list" data-rv="list"></div><div class="rv-detail" data-rv="detail"></div></div>
<script type="application/json" id="rollout-records">{dump_for_script(records)}</script></section>"""


def dump_for_script(content: Any) -> str:
    """As JSON that does not end the script element that it stands in."""
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")


class _Charts:
    """The charts over the iterations, with the data from which page.js shows the values at the pointer."""

    def __init__(self, history: History):
        self.history, points = history, history.points
        self.domain = (points[0].first, points[-1].last) if points else (0, 1)
        self.data: dict[str, Any] = {"iterations": [point.last for point in points], "domain": self.domain}
        self.data["charts"] = []

    def format_section(
        self, title: str, found: Sequence[charts.Chart], pictures: Sequence[charts.Picture] = ()
    ) -> Iterator[str]:
        """Heading and cards; nothing where no chart has values."""
        named = [(chart, charts.name_metrics(chart, self.history.names)) for chart in found]
        cards = [self.format_chart(chart, metrics) for chart, metrics in named if metrics]
        for each in pictures:
            head = f"{escape(each.title)} <span>{escape(each.x)}</span>"
            cards.append(_format_card(head, charts.draw_curves(each.curves), each.curves, escape(each.note)))
        if cards:
            yield f'<h2 id="{title.lower().replace(" ", "-")}">{escape(title)}</h2>'
            yield f'<div class="grid-of-charts">{"".join(cards)}</div>'

    def format_chart(self, chart: charts.Chart, metrics: Mapping[str, str]) -> str:
        curves = charts.build_curves(self.history, metrics, is_stack=chart.is_stack)
        shown = charts.pile_up(curves) if chart.is_stack else curves
        svg = charts.draw_curves(shown, self.domain, chart.floor, is_stack=chart.is_stack)
        is_log = charts.needs_log([max(value, chart.floor) for curve in curves for _, value in curve.points])
        unit = f"{chart.unit} (log scale)".strip() if is_log and not chart.is_stack else chart.unit
        # For the script, of each curve its value at each point, where it has one.
        found = [dict(curve.points) for curve in curves]
        rounded = [[float(f"{own[at]:.4g}") if at in own else None for at in self.data["iterations"]] for own in found]
        self.data["charts"].append(rounded)
        head = f"{escape(chart.title)} <span>{escape(unit)}</span><small>{escape(', '.join(metrics))}</small>"
        number = len(self.data["charts"]) - 1
        return _format_card(head, svg, curves, mark_keys(chart.note), f' data-chart="{number}"')


def _format_card(head: str, svg: str, curves: Sequence[charts.Curve], note: str, attributes: str = "") -> str:
    """attributes: where there are any, the legend has the newest values."""
    keys = []
    for number, curve in enumerate(curves):
        value = f' <b data-series="{number}">{format_number(curve.points[-1][1])}</b>' if attributes else ""
        key = f'<i class="swatch"></i>{escape(curve.label)}{value}'
        keys.append(f'<span class="g{curve.group}">{key}</span>')
    noted = f'<p class="note">{note}</p>' if note else ""
    return f'<div class="card"{attributes}><h3>{head}</h3>{svg}<div class="keys">{"".join(keys)}</div>{noted}</div>'


def _format_head(run: RunRecord) -> Iterator[str]:
    yield f"<h1>{escape(run.name)}</h1>"
    parts = [f'<span class="{escape(run.state)}">{escape(run.state)}</span>']
    recent = run.history.list_recent(SECONDS, 20)
    if run.state == UNFINISHED:
        parts.append(f"if its process is gone, megarl train resume={escape(str(run.directory))} continues it")
        if run.num_iterations is not None and recent:
            left = max(0, run.num_iterations - run.history.num_iterations)
            parts.append(f"{left} iterations left, about {format_seconds(sum(recent) / len(recent) * left)}")
    if run.why:
        parts.append(escape(run.why))
    yield f"<p>{' · '.join(parts)}</p>"
    if run.overrides:
        # Hydra's search path, as long as it has directories alone, is what --config-dir has set.
        paths = [path for text in run.overrides if SEARCH_PATH.fullmatch(text) for path in DIRECTORY.findall(text)]
        rest = [text for text in run.overrides if not SEARCH_PATH.fullmatch(text)]
        command = ["megarl", "train", *(f"--config-dir={path}" for path in paths), *rest]
        yield f"<p><code>{escape(shlex.join(command))}</code></p>"
    yield format_tiles(list_tiles(run))
    text = "Point at a chart to read all of them at that iteration; a band is the range of the iterations of a point."
    yield f'<p class="how">{text} <b id="at"></b></p>'


def list_tiles(run: RunRecord) -> dict[str, str]:
    """The numbers at the top, by what they are."""
    history = run.history
    tiles: dict[str, str] = {}
    if HELDOUT in history.last:
        best, at = history.best[HELDOUT]
        tiles["held-out reward, newest"] = f"{history.last[HELDOUT]:.3f}"
        tiles["held-out reward, best"] = f"{best:.3f} at {at}"
    tiles["iterations"] = f"{history.num_iterations} of {run.num_iterations or 'unknown'}"
    tiles["time, all phases"] = format_seconds(history.seconds)
    if "sampling/total_samples" in history.last:
        tiles["responses sampled"] = f"{history.last['sampling/total_samples']:,.0f}"
    return tiles


def read_warnings(path: Path, most: int = 20) -> dict[str, str]:
    """The newest different warnings of a log, and when each was last said."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    found: dict[str, str] = {}
    for when, text in (match.groups() for line in lines if (match := WARNING.match(line))):
        found.pop(text, None)
        found[text] = when or ""
    return dict(list(found.items())[-most:])


def _format_warnings(run: RunRecord) -> Iterator[str]:
    found, logged = list_warnings(run.history), read_warnings(run.directory / LOG_NAME)
    yield '<h2 id="warnings">Warnings</h2>'
    for warned in found:
        yield f'<div class="warned"><b>{escape(warned.title)}</b> {mark_keys(warned.found)}.'
        yield f"<span>What to do: {mark_keys(warned.do)}.</span></div>"
    for text, when in logged.items():
        yield f'<div class="warned logged"><b>Logged {escape(when)}</b> {escape(text)}</div>'
    if not found and not logged:
        yield f"<p>None: {NUM_RULES} rules look at the recent iterations, and none of them applies.</p>"


def _format_critic(history: History) -> Iterator[str]:
    """What its predictions were worth in the second half of the iterations; nothing without such metrics."""
    first, rows = max(1, history.num_iterations // 2 + 1), []
    for metric, (is_good, good) in CRITIC_SIGNS.items():
        if found := history.list_ranges(metric, first):
            mean = sum(each.total for each in found) / sum(each.count for each in found)
            ends = min(each.low for each in found), max(each.high for each in found)
            shown = (format_number(mean), " to ".join(map(format_number, ends)))
            number = f"{good} in {sum(is_good(each.mean) for each in found)} of {len(found)}"
            rows.append([f"<td><code>{metric}</code></td>", *(f"<td>{escape(each)}</td>" for each in (*shown, number))])
    if rows:
        what = f"means of {history.width} iterations" if history.width > 1 else "iterations"
        yield f"<h3>Did the critic help? Iterations {first} to {history.num_iterations}</h3>"
        yield format_table(("metric", "mean", "range", f"{what} with a good sign"), rows)


def _format_configuration(run: RunRecord, of_preset: Changes) -> Iterator[str]:
    yield '<h2 id="configuration">Configuration</h2>'
    if run.starts:
        newest = run.starts[-1]
        yield f'<pre class="objective">{escape(newest.objective)}</pre>'
        yield f"<p>{escape(newest.sizes)}</p><p>{escape(newest.data)}</p>"
    else:
        yield f"<p>The objective of {escape(run.name)} is not known.</p>"
    choices, changes = of_preset
    if changes:
        yield f"<h3>What differs from <code>{escape(' '.join(choices) or 'the defaults')}</code></h3>"
        rows = []
        for key, values in changes.items():
            texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
            # A narrow screen breaks a key after a dot or an underscore, not within a word.
            shown = [
                re.sub(r"([._])", r"\1<wbr>", escape(key)),
                *(escape(shorten(text, LONGEST_VALUE)) for text in texts),
            ]
            rows.append([f"<td><code>{each}</code></td>" for each in shown])
        yield format_table(("key", "preset", "this run"), rows, ' class="keys-of-config"')
    if run.starts:
        yield "<h3>Versions and hardware</h3>"
        yield format_table(("started", "machine", "versions"), [_list_cells(start) for start in run.starts])


def _list_cells(start: Start) -> list[str]:
    hardware, when = start.hardware, datetime.fromtimestamp(start.time).astimezone().strftime("%Y-%m-%d %H:%M %Z")
    machine = (
        f"{hardware.get('host')}: {hardware.get('cpu')}, {hardware.get('cores')} cores,"
        f" {hardware.get('memory_gib')} GiB; {'; '.join(map(str, hardware.get('gpus') or [])) or 'no GPU'}"
    )
    versions = ", ".join(f"{name} {version}" for name, version in start.versions.items())
    return [f"<td>{escape(when)}</td>", *(f'<td class="wide">{escape(text)}</td>' for text in (machine, versions))]


def mark_keys(text: str) -> str:
    """The text with its keys and metrics, words with a dot, a slash or an underscore inside, as code."""
    return re.sub(r"\b[A-Za-z]\w*(?:[./=][\w-]+)+|\b[a-z]+_\w+", r"<code>\g<0></code>", escape(text, quote=False))


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
    values = values if len(values) <= charts.NUM_COLOURS else [*values[: charts.NUM_COLOURS], OTHERS]
    number = {value: i for i, value in enumerate(values)}
    group_of = {run.name: number.get(get_value(run, key), charts.NUM_COLOURS) for run in runs}
    ranked = sorted(runs, key=lambda run: (run.name not in scores, -scores.get(run.name, 0.0), run.name))
    swatches = (f'<span><i class="swatch g{i}"></i>{escape(value)}</span>' for i, value in enumerate(values))
    body = [
        *_format_shared(title, runs, scores),
        *_format_runs(ranked, parameters, group_of),
        "<h2>Curves</h2>",
        "<p>Every run, over the iterations. Point at a line or a row of the table to follow one run.</p>",
        f'<div class="legend"><code>{escape(key)}</code>{"".join(swatches)}</div>',
        *_format_curves(ranked, group_of, parameters),
        *_format_settings(group_settings(runs, parameters, scores), parameters),
        *format_problems([problem for run in runs for problem in run.problems]),
    ]
    return wrap_page(title, "", body, f"Written by megarl report from {len(runs)} runs", NO_CHARTS)


def _format_shared(title: str, runs: Sequence[RunRecord], scores: Mapping[str, float]) -> Iterator[str]:
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
                curves.append(charts.Curve(label, group_of[run.name], points, run=run.name))
        if curves:
            is_log = charts.needs_log([value for curve in curves for _, value in curve.points])
            shown = escape(f"{unit} (log scale)".strip() if is_log else unit)
            yield f'<div class="card"><h3>{title} <span>{shown}</span><small>{metric}</small></h3>'
            yield f"{charts.draw_curves(curves)}</div>"
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
