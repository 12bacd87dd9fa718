"""What a run is, for its page: the objective, the configuration as a difference, versions, hardware, damaged files."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any

from megarl.report.run_facts import RunFacts
from megarl.report.run_head import NAMES
from megarl.report.starts import FILE_NAME, Start

ABSENT = "—"
LONGEST_VALUE = 300


def format_about(runs: Sequence[RunFacts]) -> Iterator[str]:
    yield '<h2 id="configuration">Configuration</h2>'
    yield from _format_objectives(runs)
    if len(runs) > 1:
        yield from _format_difference(runs)
    else:
        yield from _format_changes(runs[0])
    yield from _format_machines(runs)


def _format_objectives(runs: Sequence[RunFacts]) -> Iterator[str]:
    newest = [run.starts[-1] if run.starts else None for run in runs]
    for number, (run, start) in enumerate(zip(runs, newest, strict=True)):
        if number and start and newest[0] and start.objective == newest[0].objective:
            yield "<p>The objective of both runs.</p>"
        elif start is None:
            yield f"<p>The objective of {escape(run.name)} is not known: it has no {FILE_NAME}.</p>"
        else:
            mark = f"{NAMES[number]}  " if len(runs) > 1 else ""
            yield f'<pre class="objective">{escape(mark + start.objective)}</pre><p>{escape(start.sizes)}</p>'
            yield f"<p>{escape(start.data)}</p>"


def _format_changes(run: RunFacts) -> Iterator[str]:
    if run.changes is None:
        return
    preset = " ".join(run.choices) or "the defaults"
    if not run.changes:
        yield f"<p>Every key as in <code>{escape(preset)}</code>.</p>"
        return
    yield f"<h3>What differs from <code>{escape(preset)}</code></h3>"
    yield from _format_table(("key", "preset", "this run"), run.changes)


def _format_difference(runs: Sequence[RunFacts]) -> Iterator[str]:
    first, second = (run.config for run in runs)
    differing = {
        key: (first.get(key, ABSENT), second.get(key, ABSENT))
        for key in dict.fromkeys([*first, *second])
        if first.get(key, ABSENT) != second.get(key, ABSENT)
    }
    if not first or not second:
        return
    if not differing:
        yield "<p>The two runs have the same configuration.</p>"
        return
    yield "<h3>What differs between the runs</h3>"
    yield from _format_table(("key", "A", "B"), differing)


def _format_table(heads: Sequence[str], rows: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    yield '<div class="scroll"><table class="keys-of-config"><thead><tr>'
    yield "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr></thead><tbody>"
    for key, values in rows.items():
        cells = "".join(f"<td><code>{escape(_show(value))}</code></td>" for value in values)
        # A narrow screen breaks a key after a dot or an underscore, not within a word.
        name = re.sub(r"([._])", r"\1<wbr>", escape(key))
        yield f"<tr><td><code>{name}</code></td>{cells}</tr>"
    yield "</tbody></table></div>"


def _show(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]} …"


def _format_machines(runs: Sequence[RunFacts]) -> Iterator[str]:
    starts = [start for run in runs for start in run.starts]
    if not starts:
        return
    yield "<h3>Versions and hardware</h3>"
    yield '<div class="scroll"><table><thead><tr><th>started</th><th>machine</th><th>versions</th></tr></thead><tbody>'
    for run in runs:
        for start in run.starts:
            mark = f"{NAMES[runs.index(run)]} " if len(runs) > 1 else ""
            versions = ", ".join(f"{name} {version}" for name, version in start.versions.items())
            when = datetime.fromtimestamp(start.time).astimezone().strftime("%Y-%m-%d %H:%M %Z")
            yield f'<tr><td>{mark}{escape(when)}</td><td class="wide">{escape(_describe_machine(start))}</td>'
            yield f'<td class="wide">{escape(versions)}</td></tr>'
    yield "</tbody></table></div>"


def _describe_machine(start: Start) -> str:
    hardware = start.hardware
    gpus = "; ".join(map(str, hardware.get("gpus") or [])) or "no GPU"
    return (
        f"{hardware.get('host')}: {hardware.get('cpu')}, {hardware.get('cores')} cores,"
        f" {hardware.get('memory_gib')} GiB; {gpus}"
        + (f"; {peak:.3g} TFLOP/s at most for policy and critic" if (peak := hardware.get("peak_tflops")) else "")
    )


def format_problems(runs: Sequence[RunFacts]) -> Iterator[str]:
    problems = [problem for run in runs for problem in run.problems]
    if problems:
        yield '<h2 id="files">Files that are missing or damaged</h2><ul>'
        yield from (f"<li><code>{escape(problem)}</code></li>" for problem in problems)
        yield "</ul>"
