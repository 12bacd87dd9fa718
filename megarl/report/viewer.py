"""The responses of a run for its page, token by token: those of tokens.jsonl (`megarl.report.token_file`)."""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megarl.files import parse_json
from megarl.report.token_file import FILE_NAME

HERE = Path(__file__).resolve().parent
KEYS = {"iteration", "kind", "sample", "prompt", "score", "num_tokens", "observed", "tokens"}
SMALLEST_LINE = 500
"""Bytes; hardly a line has fewer"""
Record = dict[str, Any]


def load_records(run_dir: Path, max_bytes: int) -> list[Record]:
    """Records in the file's order, of `max_bytes` at most on the page: those of the last iteration, of the first one,
    then of those between, so that they are spread evenly over the run.

    Lines that cannot be read are left out; without a file there are none.
    """
    path, places, found = run_dir / FILE_NAME, dict[int, list[int]](), dict[int, Record]()
    if not path.is_file():
        return []
    with path.open("rb") as file:
        place = 0
        for line in file:
            if matched := re.match(rb'\{"iteration":\s?(\d+)', line):
                places.setdefault(int(matched[1]), []).append(place)
            place += len(line)
        iterations = sorted(places)
        for number in _spread(len(iterations)):
            for place in places[iterations[number]] if max_bytes >= SMALLEST_LINE else ():
                file.seek(place)
                line = file.readline()
                size = len(line) + 5 * line.count(b"<")
                with contextlib.suppress(ValueError):  # The line that is being written.
                    if size <= max_bytes and (record := parse_json(line)).keys() >= KEYS:
                        found[place] = record
                        max_bytes -= size
    return [record for _, record in sorted(found.items())]


def _spread(num: int) -> Iterator[int]:
    """0 to num - 1: the last, the first, then the middle of the widest gap, and so on."""
    yield from dict.fromkeys([num - 1, 0] if num else [])
    gaps = [(0, num - 1)]
    while gaps:
        wider = []
        for low, high in gaps:
            if high - low > 1:
                middle = (low + high) // 2
                yield middle
                wider += [(low, middle), (middle, high)]
        gaps = wider


def format_viewer(records: Sequence[Record]) -> str:
    """The section, with its style and script; "" where there is nothing to show."""
    if not records:
        return ""
    return f"""<section class="viewer"><style>{(HERE / "viewer.css").read_text()}</style>
<p><code>{FILE_NAME}</code> has a few responses of each iteration and of each evaluation, token by token
(<code>logger.num_token_records</code>). Those shown here are spread evenly over the run.</p>
<div class="rv-controls"><span data-rv="outcome"></span><span data-rv="kind"></span>
<label>colour <select data-rv="field"></select></label>
<input data-rv="query" type="search" placeholder="search prompts and responses" aria-label="search the responses">
<span data-rv="count"></span></div>
<div class="rv-panes"><div class="rv-list" data-rv="list"></div><div class="rv-detail" data-rv="detail"></div></div>
<script type="application/json" id="rollout-records">{dump_for_script(records)}</script>
<script type="module">{(HERE / "viewer.js").read_text()}</script></section>"""


def dump_for_script(content: Any) -> str:
    """As JSON that does not end the script element that it stands in."""
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
