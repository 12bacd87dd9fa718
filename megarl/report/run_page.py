"""The page of a run, or of two side by side: one self-contained HTML file, built from what the runs wrote."""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megarl.report.critic_pictures import GRAY, Picture, build_by_part, build_pictures
from megarl.report.metric_names import QUARTERS
from megarl.report.responses import bin_lengths
from megarl.report.run_about import format_about, format_problems
from megarl.report.run_charts import (
    CRITIC_CHARTS,
    ENGINES,
    LEARNING,
    POLICY,
    TIME_CHARTS,
    Chart,
    build_series,
    list_others,
    name_metrics,
)
from megarl.report.run_facts import RunFacts
from megarl.report.run_head import format_head, format_warnings, mark_keys, name_run
from megarl.report.run_svg import Drawn, Series, draw_bars, draw_series, draw_stack
from megarl.report.signs import explain_mismatch
from megarl.report.svg import draw_lines
from megarl.report.text import format_number

HERE = Path(__file__).resolve().parent
MOST_OTHERS = 150
"""Charts under "All other metrics"; further metrics are in metrics.jsonl alone"""
SHOWN = (LEARNING, POLICY, CRITIC_CHARTS, ENGINES, TIME_CHARTS)
HEAD = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
)
POSITIONS = (
    ("mismatch/logprob_gap_at_{}", "Gap between the log-probs, by position", "quarter of the response"),
    ("mismatch/kl_at_{}", "Mismatch (KL), by position", "quarter of the response"),
)
HOW_TO_READ = {
    "explained_variance_by_position": "Rising: the critic learns from the response itself. Flat and high: it knows the"
    " prompt and little else. Falling: it loses track as a response gets longer.",
    "explained_variance_by_length": "A quartile far below the others is a kind of response that the critic has not"
    " understood.",
    "calibration_first": "On the gray line the critic promises what comes; above it, it lags behind a policy that gets"
    " better; flatter than it, its values vary too much.",
    "calibration_middle": "The same at the middle of each response.",
    "snr_by_position": "How much of an advantage is about its own token; the gray line is what advantages without a"
    " critic would have.",
    "mismatch/logprob_gap_at_{}": "Rising to the right: errors that add up. High at the left: the prompts differ.",
}


class _Charts:
    """The charts of a page, numbered, and the data for run.js."""

    def __init__(self, runs: Sequence[RunFacts]):
        self.runs = runs
        ends = [(run.history.points[0].first, run.history.points[-1].last) for run in runs if run.history.points]
        self.domain = (min(low for low, _ in ends), max(high for _, high in ends)) if ends else (0, 1)
        self.data: list[Any] = []

    def format_section(self, title: str, charts: Sequence[Chart], more: Sequence[str] = ()) -> Iterator[str]:
        """Heading, cards and a line for each chart that has no values but could have some."""
        cards = [card for chart in charts for card in self.format_chart(chart)]
        missing = [chart for chart in charts if chart.turn_on and not self.has_values(chart)]
        if not cards and not more and not missing:
            return
        yield f'<h2 id="{_name_anchor(title)}">{escape(title)}</h2>'
        yield '<div class="grid-of-charts">'
        yield from (*cards, *more)
        yield "</div>"
        if missing:
            shown = "; ".join(
                f"<b>{escape(chart.title)}</b>, which takes {mark_keys(chart.turn_on)}" for chart in missing
            )
            yield f'<p class="missing">Without values: {shown}.</p>'

    def has_values(self, chart: Chart) -> bool:
        return any(name_metrics(chart, run.history.last) for run in self.runs)

    def format_chart(self, chart: Chart) -> Iterator[str]:
        """Its cards: one, or one for each run where the runs cannot lie over one another."""
        names = dict.fromkeys(name for run in self.runs for name in run.history.last)
        metrics = name_metrics(chart, names)
        found = [
            build_series(run.history, metrics, number, is_stack=chart.is_stack) for number, run in enumerate(self.runs)
        ]
        if chart.is_stack:
            for run, series in zip(self.runs, found, strict=True):
                if series:
                    yield self.format_card(chart, metrics, series, name_run(run, self.runs))
        elif any(found):
            yield self.format_card(chart, metrics, [each for series in found for each in series], "")

    def format_card(self, chart: Chart, metrics: Mapping[str, str], series: Sequence[Series], suffix: str) -> str:
        drawn = draw_stack(series, self.domain) if chart.is_stack else draw_series(series, self.domain, chart.floor)
        number = self.add(drawn)
        unit = f"{chart.unit} (log scale)".strip() if drawn.is_log else chart.unit
        names = ", ".join(dict.fromkeys(metrics))
        note = f'<p class="note">{mark_keys(chart.note)}</p>' if chart.note else ""
        head = f"<h3>{escape(chart.title)}{suffix} <span>{escape(unit)}</span><small>{escape(names)}</small></h3>"
        return f'<div class="card" data-chart="{number}">{head}{drawn.svg}{_format_keys(series)}{note}</div>'

    def add(self, drawn: Drawn) -> int:
        self.data.append(drawn.data)
        return len(self.data) - 1

    def format_others(self) -> Iterator[str]:
        names = dict.fromkeys(name for run in self.runs for name in run.history.last)
        others = [name for name in list_others(list(names), SHOWN) if not name.startswith("derived/")]
        if not others:
            return
        yield '<h2 id="all-other-metrics">All other metrics</h2>'
        yield f'<details><summary>{len(others)} metrics, by name</summary><div class="grid-of-charts">'
        for name in others[:MOST_OTHERS]:
            yield from self.format_chart(Chart(name, "", {name: "value"}))
        yield "</div></details>"
        if len(others) > MOST_OTHERS:
            yield f"<p>{len(others) - MOST_OTHERS} more are in metrics.jsonl.</p>"

    def format_data(self) -> str:
        runs = [[point.last for point in run.history.points] for run in self.runs]
        content = {"runs": runs, "domain": self.domain, "charts": self.data}
        return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")


def format_run_page(runs: Sequence[RunFacts], viewer: str = "") -> str:
    """The whole page. runs: one, or two to compare. viewer: an HTML section of responses, of the first run."""
    charts = _Charts(runs)
    body = [
        *format_head(runs),
        *format_warnings(runs),
        *charts.format_section("Learning", LEARNING, [card for run in runs for card in _format_lengths(run, runs)]),
        *charts.format_section("Policy", POLICY),
        *charts.format_section("Critic", CRITIC_CHARTS, list(_format_critic(runs))),
        *charts.format_section("Trainer and rollout engine", ENGINES, list(_format_positions(runs))),
        *_format_causes(runs),
        *charts.format_section("Time", TIME_CHARTS),
        *format_about(runs),
        *charts.format_others(),
        *([f'<h2 id="responses">Responses</h2>{viewer}'] if viewer else []),
        *format_problems(runs),
    ]
    style = "".join((HERE / name).read_text() for name in ("sweep.css", "run.css"))
    title = " and ".join(run.name for run in runs)
    folders = " and ".join(f"<code>{escape(str(run.directory))}</code>" for run in runs)
    return "\n".join(
        [
            f"{HEAD}<title>{escape(title)}</title><style>{style}</style></head><body>{_format_nav(body)}<main>",
            *body,
            f"<footer>Written by tools/report.py from {folders}</footer></main>",
            f'<script type="application/json" id="data">{charts.format_data()}</script>',
            # A module: its names are its own.
            f'<script type="module">{(HERE / "run.js").read_text()}</script></body></html>\n',
        ]
    )


def _format_nav(body: Sequence[str]) -> str:
    heads = [line for line in body if line.startswith('<h2 id="')]
    links = [line.split('id="')[1].split("<")[0].split('">') for line in heads]
    shown = "".join(f'<a href="#{anchor}">{title}</a>' for anchor, title in links)
    return f'<nav>{shown}<input id="find" type="search" placeholder="find a metric" aria-label="find a metric"></nav>'


def _format_critic(runs: Sequence[RunFacts]) -> Iterator[str]:
    for run in runs:
        for picture in build_pictures(run.history.lines):
            yield _format_picture(picture, name_run(run, runs))


def _format_positions(runs: Sequence[RunFacts]) -> Iterator[str]:
    for run in runs:
        for pattern, title, x in POSITIONS:
            metrics = [pattern.format(quarter) for quarter in QUARTERS]
            lines = [line for line in run.history.lines if metrics[0] in line]
            picture = build_by_part(pattern, title, x, lines, metrics)
            if any(curve.points for curve in picture.curves):
                yield _format_picture(picture, name_run(run, runs))


def _format_picture(picture: Picture, suffix: str) -> str:
    keys = "".join(
        f'<span class="g{8 if curve.group == GRAY else curve.group}"><i class="swatch"></i>{escape(curve.label)}</span>'
        for curve in picture.curves
    )
    svg = draw_lines(picture.curves, picture.whole).replace(f'class="curve g{GRAY}"', 'class="curve g8"')
    note = f'<p class="note">{escape(HOW_TO_READ[picture.name])}</p>' if picture.name in HOW_TO_READ else ""
    head = f"<h3>{escape(picture.title)}{suffix} <span>{escape(picture.x)}</span></h3>"
    return f'<div class="card">{head}{svg}<div class="keys">{keys}</div>{note}</div>'


def _format_causes(runs: Sequence[RunFacts]) -> Iterator[str]:
    for run in runs:
        causes = explain_mismatch(run.history, run.config)
        if causes:
            yield f"<h3>Why the log-probs differ{name_run(run, runs)}</h3><dl>"
            for cause in causes:
                yield f"<dt>{mark_keys(cause.found)}</dt><dd>Likely: {mark_keys(cause.likely)}."
                yield f"To do: {mark_keys(cause.do)}.</dd>"
            yield "</dl>"
        if (count := run.history.counts.get("sync/bytes")) and "sync/probe_logprob_gap" in run.history.best:
            worst, at = run.history.best["sync/probe_logprob_gap"]
            yield (
                f"<p>{count} syncs{name_run(run, runs)}: each version was served only after the checksums of every"
                " server's weights had been found equal to the trainer's. The largest median gap of the probe's tokens"
                f" afterwards was {format_number(worst)}, at iteration {at}.</p>"
            )


def _format_lengths(run: RunFacts, runs: Sequence[RunFacts]) -> Iterator[str]:
    trained = [response for response in run.responses if response.iteration > 0]
    recent = trained[len(trained) * 2 // 3 :]
    if recent:
        bins = [(each.low, (each.num_correct, each.num_wrong)) for each in bin_lengths(recent)]
        head = f"<h3>Length of right and wrong responses{name_run(run, runs)} <span>generated tokens</span></h3>"
        keys = '<span class="g2"><i class="swatch"></i>right</span><span class="g6"><i class="swatch"></i>wrong</span>'
        note = f"{len(recent)} sampled responses of iterations {recent[0].iteration} to {recent[-1].iteration}."
        bars = draw_bars(bins, (2, 6))
        yield f'<div class="card">{head}{bars}<div class="keys">{keys}</div><p class="note">{note}</p></div>'


def _find_domain(series: Sequence[Series]) -> tuple[int, int]:
    return min(each.iterations[0] for each in series), max(each.iterations[-1] for each in series)


def _format_keys(series: Sequence[Series]) -> str:
    """A legend whose numbers run.js replaces by those at the pointer; the two runs' values of a metric side by side."""
    entries: dict[tuple[str, int], list[str]] = {}
    for number, each in enumerate(series):
        value = f'<b data-series="{number}">{format_number(each.values[-1])}</b>'
        entries.setdefault((each.label, each.group), []).append(value)
    keys = (
        f'<span class="g{group}" data-group="{group}"><i class="swatch"></i>{escape(label)} {" / ".join(values)}</span>'
        for (label, group), values in entries.items()
    )
    return f'<div class="keys">{"".join(keys)}</div>'


def _name_anchor(title: str) -> str:
    return title.lower().replace(" ", "-")
