"""The responses of a run for its page, token by token: those of tokens.jsonl (`megarl.report.token_file`)."""

import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.files import parse_json
from megarl.report.token_file import FILE_NAME

HERE = Path(__file__).resolve().parent
KEYS = {"iteration", "kind", "sample", "prompt", "score", "num_tokens", "observed", "tokens"}
Record = dict[str, Any]


def load_records(run_dir: Path, max_bytes: int) -> list[Record]:
    """Records in the file's order, of `max_bytes` at most on the page: those of every iteration, or of every second,
    fourth ... one up to the last. Lines that cannot be read are left out; without a file there are none.
    """
    sizes, lines = dict[int, int](), list[tuple[int, bytes]]()
    if (path := run_dir / FILE_NAME).is_file():
        matches = ((re.match(rb'\{"iteration":\s?(\d+)', line), line) for line in path.read_bytes().splitlines())
        lines = [(int(match[1]), line) for match, line in matches if match]
    for number, line in lines:
        sizes[number] = sizes.get(number, 0) + len(line) + 1 + 5 * line.count(b"<")
    chosen = sorted(sizes, reverse=True)
    while sum(sizes[number] for number in chosen) > max_bytes:
        chosen = chosen[::2] if len(chosen) > 1 else []
    kept, found = set(chosen), list[Record]()
    for line in (line for number, line in lines if number in kept):
        with contextlib.suppress(ValueError):  # The line that is being written.
            if (record := parse_json(line)).keys() >= KEYS:
                found.append(record)
    return found


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
