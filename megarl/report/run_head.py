"""The head of a run's page: its state, its newest numbers, and warnings with what to do."""

import shlex
from collections.abc import Iterator, Sequence
from html import escape

from megarl.config.errors import ConfigError
from megarl.config.search_path import show_overrides
from megarl.report.history import SECONDS, History, Point, Range
from megarl.report.run_facts import RunFacts
from megarl.report.signs import NUM_RULES, list_warnings
from megarl.report.sweep import UNFINISHED
from megarl.report.text import format_number, format_seconds

NAMES = ("A", "B")
"""Of two runs on a page"""
MOST_RECENT = 10
"""Points that a mean of the last iterations is over, at most"""


def format_head(runs: Sequence[RunFacts]) -> Iterator[str]:
    for number, run in enumerate(runs):
        mark = f'<span class="run-name">{NAMES[number]}</span> ' if len(runs) > 1 else ""
        yield f"<h1>{mark}{escape(run.name)}</h1>"
        yield f'<p><span class="{escape(run.state)}">{escape(run.state)}</span>{_format_state(run)}</p>'
        if run.overrides:
            yield f"<p><code>{escape(format_command(run))}</code></p>"
        if len(runs) == 1:
            yield '<div class="tiles">'
            yield from (
                f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
                for name, value in list_tiles(run).items()
            )
            yield "</div>"
    if len(runs) > 1:
        yield from _format_pair(runs)
    text = "Point at a chart to read all of them at that iteration; a band is the range of the iterations of a point."
    solid = f"Solid lines are {NAMES[0]}, dashed lines {NAMES[1]}. " if len(runs) > 1 else ""
    yield f'<p class="how">{solid}{text} <b id="at"></b></p>'


def format_command(run: RunFacts) -> str:
    """The command that starts the run, as a shell reads it."""
    try:
        words = show_overrides(run.overrides)
    except ConfigError:  # The file may be damaged.
        words = list(run.overrides)
    return shlex.join(["megarl", "train", *words])


def _format_state(run: RunFacts) -> str:
    parts = []
    if run.state == UNFINISHED and run.silent_s is not None:
        parts.append(
            f"no sign of life for {format_seconds(run.silent_s)}: if its process is gone,"
            f" python -m megarl.train resume={run.directory} continues it"
        )
    elif (
        run.state == UNFINISHED and run.num_iterations is not None and (recent := run.history.list_recent(SECONDS, 20))
    ):
        left = max(0, run.num_iterations - run.history.num_iterations)
        seconds, minutes = sum(recent) / len(recent) * left, run.config.get("train.max_minutes")
        limit = f", unless train.max_minutes={minutes:g} ends it" if isinstance(minutes, int | float) else ""
        parts.append(f"{left} iterations left, about {format_seconds(seconds)}{limit}")
    if run.why:
        parts.append(run.why)
    return "".join(f" · {escape(part)}" for part in parts)


def list_tiles(run: RunFacts) -> dict[str, str]:
    """The numbers at the top, by what they are."""
    history = run.history
    tiles: dict[str, str] = {}
    if "reward/heldout" in history.last:
        best, at = history.best["reward/heldout"]
        tiles["held-out reward, newest"] = f"{history.last['reward/heldout']:.3f}"
        tiles["held-out reward, best"] = f"{best:.3f} at {at}"
    if recent := _list_newest_quarter(history, "reward/mean"):
        tiles["training reward, mean of the last iterations"] = _format_mean(recent)
    of = "" if run.num_iterations is None else f" of {run.num_iterations}"
    tiles["iterations"] = f"{history.num_iterations}{of}"
    tiles["time, all phases"] = format_seconds(history.seconds)
    if "sampling/total_samples" in history.last:
        tiles["responses sampled"] = f"{history.last['sampling/total_samples']:,.0f}"
    if rates := history.list_recent("derived/generated_tokens_per_second", 20):
        tiles["generated tokens per second"] = format_number(sum(rates) / len(rates))
    if recent := _list_newest_quarter(history, "critic/explained_variance"):
        tiles["explained variance, mean of the last iterations"] = _format_mean(recent)
    if recent := _list_newest_quarter(history, "mismatch/logprob_gap_mean"):
        tiles["gap to the rollout engine, mean of the last iterations"] = _format_mean(recent)
    return tiles


def _list_newest_quarter(history: History, metric: str) -> list[tuple[Point, Range]]:
    """The newest of the points that have the metric: a quarter of them, at least one and at most MOST_RECENT."""
    found = [(point, point.metrics[metric]) for point in history.points if metric in point.metrics]
    return found[-min(MOST_RECENT, max(1, len(found) // 4)) :] if found else []


def _format_mean(recent: Sequence[tuple[Point, Range]]) -> str:
    """`0.887 at 31 to 40`: the mean over these iterations."""
    total, count = sum(found.total for _, found in recent), sum(found.count for _, found in recent)
    first, last = recent[0][0].first, recent[-1][0].last
    return f"{format_number(total / count)} at {first}" + (f" to {last}" if last > first else "")


def _format_pair(runs: Sequence[RunFacts]) -> Iterator[str]:
    tiles = [list_tiles(run) for run in runs]
    yield '<div class="scroll"><table><thead><tr><th></th>'
    yield "".join(f'<th class="number">{name}</th>' for name in NAMES) + "</tr></thead><tbody>"
    for name in dict.fromkeys(name for each in tiles for name in each):
        cells = "".join(f'<td class="number">{escape(each.get(name, ""))}</td>' for each in tiles)
        yield f"<tr><td>{escape(name)}</td>{cells}</tr>"
    yield "</tbody></table></div>"


def format_warnings(runs: Sequence[RunFacts]) -> Iterator[str]:
    yield '<h2 id="warnings">Warnings</h2>'
    for number, run in enumerate(runs):
        mark = f"{NAMES[number]}: " if len(runs) > 1 else ""
        found = list_warnings(run.history, run.config)
        for warned in found:
            yield f'<div class="warned"><b>{escape(mark + warned.title)}</b> {mark_keys(warned.found)}.'
            yield f"<span>What to do: {mark_keys(warned.do)}.</span></div>"
        for each in run.logged:
            when = "" if each.iteration is None else f" after iteration {each.iteration}"
            times = f", {each.count} times in all" if each.count > 1 else ""
            yield f'<div class="warned logged"><b>{escape(mark)}Logged{when}{times}</b> {escape(each.text)}</div>'
        if not found and not run.logged:
            yield f"<p>{mark}None: {NUM_RULES} rules look at the recent iterations, and none of them applies.</p>"


def name_run(run: RunFacts, runs: Sequence[RunFacts]) -> str:
    """What stands behind a heading that two runs have each for itself; empty on the page of one run."""
    return f" {NAMES[runs.index(run)]}" if len(runs) > 1 else ""


def mark_keys(text: str) -> str:
    """The text with its keys and metrics, words with a dot or a slash inside, as code."""
    return " ".join(_mark_word(word) for word in text.split(" "))


def _mark_word(word: str) -> str:
    core = word.strip("(),;:.")
    inside = core.strip("0123456789.")
    # Not the numbers of a formula.
    if core[:1].isalpha() and ("." in inside or "/" in inside or "=" in inside or "_" in inside):
        before, _, after = word.partition(core)
        return f"{escape(before)}<code>{escape(core)}</code>{escape(after)}"
    return escape(word)
