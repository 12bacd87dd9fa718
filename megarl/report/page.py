"""The page of a run: one self-contained HTML file, built from what the run wrote, while it trains or after."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from megarl.report import charts
from megarl.report.charts import Chart, Curve, Picture, build_curves, draw_curves, name_metrics, pile_up
from megarl.report.metrics import SECONDS, History
from megarl.report.record import HELDOUT, UNFINISHED, RunRecord, Start
from megarl.report.signs import NUM_RULES, list_warnings
from megarl.report.terminal import LOG_NAME
from megarl.report.text import format_number, format_seconds, shorten
from megarl.report.tokens import dump_for_script, format_viewer, load_records

HERE = Path(__file__).resolve().parent
VIEWER_BYTES = 4_000_000
"""Most bytes of responses"""
LONGEST_VALUE = 300
WARNING = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d )?warning: (.*)")
"""A line of train.log, with or without its time"""


Changes = tuple[Sequence[str], Mapping[str, tuple[Any, Any]]]
"""The options of groups that a run chose, and (their value, the run's) of each key that differs"""


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
        *drawn.format_section("Trainer and rollout engine", charts.ENGINES, charts.list_gap_pictures(history)),
        *drawn.format_section("Time", charts.TIME_CHARTS),
        *_format_configuration(run, changes),
        *([f'<h2 id="responses">Responses</h2>{viewer}'] if viewer else []),
        *format_problems(run.problems),
    ]
    heads = [line for line in body if line.startswith('<h2 id="')]
    links = [re.sub(r'<h2 id="(.*?)">(.*?)<.*', r'<a href="#\1">\2</a>', head, flags=re.DOTALL) for head in heads]
    footer = f"Written by megarl report from <code>{escape(str(run.directory))}</code>"
    return wrap_page(run.name, f"<nav>{''.join(links)}</nav>", body, footer, drawn.data, "page.js")


def wrap_page(title: str, nav: str, body: Sequence[str], footer: str, data: Any, script: str) -> str:
    """A page with one style. data: for the script, a file beside this one."""
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{(HERE / 'page.css').read_text()}</style></head><body>{nav}<main>",
            *body,
            f"<footer>{footer}</footer></main>",
            f'<script type="application/json" id="data">{dump_for_script(data)}</script>',
            # A module: its names are its own.
            f'<script type="module">{(HERE / script).read_text()}</script></body></html>\n',
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


class _Charts:
    """The charts over the iterations, with the data from which page.js shows the values at the pointer."""

    def __init__(self, history: History):
        self.history, points = history, history.points
        self.domain = (points[0].first, points[-1].last) if points else (0, 1)
        self.data: dict[str, Any] = {"iterations": [point.last for point in points], "domain": self.domain}
        self.data["charts"] = []

    def format_section(self, title: str, found: Sequence[Chart], pictures: Sequence[Picture] = ()) -> Iterator[str]:
        """Heading and cards; nothing where no chart has values."""
        named = [(chart, name_metrics(chart, self.history.names)) for chart in found]
        cards = [self.format_chart(chart, metrics) for chart, metrics in named if metrics]
        if cards := [*cards, *map(_format_picture, pictures)]:
            yield f'<h2 id="{title.lower().replace(" ", "-")}">{escape(title)}</h2>'
            yield f'<div class="grid-of-charts">{"".join(cards)}</div>'

    def format_chart(self, chart: Chart, metrics: Mapping[str, str]) -> str:
        curves = build_curves(self.history, metrics, is_stack=chart.is_stack)
        shown = pile_up(curves) if chart.is_stack else curves
        svg = draw_curves(shown, self.domain, chart.floor, is_stack=chart.is_stack)
        is_log = charts.needs_log([max(value, chart.floor) for curve in curves for _, value in curve.points])
        unit = f"{chart.unit} (log scale)".strip() if is_log and not chart.is_stack else chart.unit
        # For the script, of each curve its value at each point, where it has one.
        found = [dict(curve.points) for curve in curves]
        rounded = [[float(f"{own[at]:.4g}") if at in own else None for at in self.data["iterations"]] for own in found]
        self.data["charts"].append(rounded)
        head = f"{escape(chart.title)} <span>{escape(unit)}</span><small>{escape(', '.join(metrics))}</small>"
        number = len(self.data["charts"]) - 1
        return _format_card(head, svg, curves, mark_keys(chart.note), f' data-chart="{number}"')


def _format_card(head: str, svg: str, curves: Sequence[Curve], note: str, attributes: str = "") -> str:
    """attributes: where there are any, the legend has the newest values."""
    keys = []
    for number, curve in enumerate(curves):
        value = f' <b data-series="{number}">{format_number(curve.points[-1][1])}</b>' if attributes else ""
        key = f'<i class="swatch"></i>{escape(curve.label)}{value}'
        keys.append(f'<span class="g{curve.group}">{key}</span>')
    noted = f'<p class="note">{note}</p>' if note else ""
    return f'<div class="card"{attributes}><h3>{head}</h3>{svg}<div class="keys">{"".join(keys)}</div>{noted}</div>'


def _format_picture(picture: Picture) -> str:
    svg = draw_curves(picture.curves)
    head = f"{escape(picture.title)} <span>{escape(picture.x)}</span>"
    return _format_card(head, svg, picture.curves, escape(picture.note))


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
        yield f"<p><code>{escape(shlex.join(['megarl', 'train', *run.overrides]))}</code></p>"
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
