"""The responses of a run for its page: a section that shows them token by token, and their lengths.

They are those of tokens.jsonl (`megarl.report.token_file`), and where there is none the texts of rollouts.jsonl. Of a
large file lines at places that are spread evenly over it are read, never the whole.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megarl.files import parse_json
from megarl.report.text import shorten
from megarl.report.token_file import FILE_NAME, LONGEST_TEXT, TRAIN

HERE = Path(__file__).resolve().parent
ROLLOUTS = "rollouts.jsonl"
"""`megarl.rollout.rollout_file.FILE_NAME`, which this room may not import"""
READ_WHOLE = 16_000_000
"""Bytes of a file that is read from start to end"""
NUM_PLACES = 120
"""Places at which a larger file is read"""
LINES_AT_PLACE = 4
"""Lines of rollouts.jsonl read at a place; of tokens.jsonl those of a whole iteration are"""
TAIL = 1_000_000
"""Bytes before the end of a file at which the last place is"""
KEYS = {"iteration", "sample", "prompt", "score"}
"""What the lines of both files have"""
EMPTY = 'id="rollout-records">[]<'
_ITERATION = re.compile(rb'\{"iteration":\s?(\d+)')

Record = dict[str, Any]


@dataclass(frozen=True)
class Responses:
    has_tokens: bool
    """Whether they are those of tokens.jsonl"""
    blocks: Sequence[Sequence[Record]]
    """Records that follow one another in the file, in its order: of tokens.jsonl those of an iteration, else those of
    a place, or a line where all are read"""

    def list_lengths(self) -> list[tuple[int, int, bool]]:
        """(iteration, generated tokens, whether it is correct) of each response of training that is what a run writes,
        in the file's order.
        """
        found = []
        for record in (each for block in self.blocks for each in block):
            try:
                if self.has_tokens:
                    size = int(record["num_tokens"]) - sum(end - start for start, end in record["observed"])
                else:
                    size = sum(record["response"]["generated"])
                if record["iteration"] > 0 and record.get("kind", TRAIN) == TRAIN:
                    found.append((int(record["iteration"]), size, bool(record["score"]["correct"])))
            except (KeyError, TypeError, ValueError):
                continue
        return found


def load_responses(run_dir: Path) -> Responses:
    """Lines that cannot be read are left out, and where there is no file there is no block."""
    path = run_dir / FILE_NAME
    has_tokens = path.is_file() and path.stat().st_size > 0
    path = path if has_tokens else run_dir / ROLLOUTS
    if not path.is_file():
        return Responses(has_tokens, [])
    size = path.stat().st_size
    places = [size * number // NUM_PLACES for number in range(NUM_PLACES)] + [max(0, size - TAIL)]
    blocks: dict[int, dict[int, Record]] = {}
    with path.open("rb") as file:
        for place in [0] if size <= READ_WHOLE else places:
            to_end = size <= READ_WHOLE or place == places[-1]
            for start, line in _read_place(file, place, to_end, has_tokens):
                try:
                    record = parse_json(line)
                except ValueError:  # The line that is being written.
                    continue
                if isinstance(record, dict) and record.keys() >= KEYS:
                    key = record["iteration"] if has_tokens else start if size <= READ_WHOLE else place
                    blocks.setdefault(key, {})[start] = record
    return Responses(has_tokens, [list(block.values()) for _, block in sorted(blocks.items())])


def _read_place(file: BinaryIO, place: int, to_end: bool, whole_iterations: bool) -> Iterator[tuple[int, bytes]]:
    """(offset, line) from the first line that begins at `place` or later."""
    file.seek(max(0, place - 1))
    if place:
        file.readline()
    start, seen, num = file.tell(), set[int](), 0
    for line in file:
        matched = _ITERATION.match(line)
        seen.add(int(matched[1]) if matched else -1)
        # The first iteration may have begun before this place.
        is_wanted = to_end or not whole_iterations or place == 0 or len(seen) == 2
        num += is_wanted
        if not to_end and (num > LINES_AT_PLACE if not whole_iterations else len(seen) > (1 if place == 0 else 2)):
            return
        if is_wanted:
            yield start, line
        start += len(line)


def bin_lengths(lengths: Iterable[tuple[int, bool]], num_bins: int = 24) -> list[tuple[float, tuple[int, int]]]:
    """(lower end, (number of right, number of wrong responses)) of bins of equal width; empty without responses.

    lengths: (generated tokens, whether it is correct).
    """
    found = list(lengths)
    longest = max((size for size, _ in found), default=0) + 1
    width = max(1.0, longest / num_bins)
    counts = [[0, 0] for _ in range(math.ceil(longest / width))]
    for size, is_correct in found:
        counts[int(size / width)][not is_correct] += 1
    return [(i * width, (right, wrong)) for i, (right, wrong) in enumerate(counts)] if found else []


def format_viewer(responses: Responses, max_bytes: int) -> str:
    """The section, with its style and script, of `max_bytes` at most; "" where there is nothing to show, or no room."""
    frame = format_frame(responses.has_tokens)
    texts = choose_texts(responses, max_bytes - len(frame.encode()) - 2)
    return frame.replace(EMPTY, EMPTY.replace("[]", f"[{','.join(texts)}]"), 1) if texts else ""


def choose_texts(responses: Responses, max_bytes: int) -> list[str]:
    """The records as JSON without "<", in the file's order, that fit: of the last block, the first one, then of those
    between, so that what is shown is spread evenly over the run.
    """
    chosen: dict[tuple[int, int], str] = {}
    left = max_bytes
    for number in _spread(len(responses.blocks)):
        for place, record in enumerate(responses.blocks[number]):
            shown = record if responses.has_tokens else _condense(record)
            text = json.dumps(shown, separators=(",", ":")).replace("<", "\\u003c")
            if len(text) + 1 <= left:
                chosen[number, place] = text
                left -= len(text) + 1
    return [text for _, text in sorted(chosen.items())]


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


def _condense(record: Mapping[str, Any]) -> Record:
    """A record of rollouts.jsonl as one of tokens.jsonl without tokens, and with the turns' texts."""
    response, prompt, score = record["response"], record["prompt"], record["score"]
    generated = [x for x, own in zip(response["rollout_logprobs"], response["generated"], strict=True) if own]
    return {
        **{name: record[name] for name in ("iteration", "sample", "weight_version", "group")},
        "kind": TRAIN,
        "prompt": {"id": prompt["id"], **{name: shorten(prompt[name], LONGEST_TEXT) for name in ("text", "answer")}},
        "score": score,
        "finish_reason": response["finish_reason"],
        "num_tokens": len(response["token_ids"]),
        "surprise": -sum(generated) / max(1, len(generated)),
        "turns": [
            {**turn, "text": shorten(turn["text"], LONGEST_TEXT)}
            for turn in response["turns"] or [{"start": 0, "text": response["text"], "reward": 0, "details": {}}]
        ],
    }


def format_frame(has_tokens: bool) -> str:
    """The section with an empty list of records."""
    source = (
        f"<code>{FILE_NAME}</code> has a few responses of each iteration and of each evaluation, token by token"
        " (<code>logger.num_token_records</code>); <code>logger.token_passes=true</code> adds the entropy at each token"
        " and how the update changed it. Those shown here are spread evenly over the run."
        if has_tokens
        else f"Texts of <code>{ROLLOUTS}</code>, spread evenly over the run; <code>logger.num_token_records=8</code>"
        " adds log-probs, values and advantages of each token."
    )
    return f"""<section class="viewer"><style>{(HERE / "viewer.css").read_text()}</style>
<p>{source}</p>
<div class="rv-controls"><span data-rv="outcome"></span><span data-rv="kind"></span>
<label>sort <select data-rv="sort"></select></label><label>colour <select data-rv="field"></select></label>
<input data-rv="query" type="search" placeholder="search prompts and responses" aria-label="search the responses">
<span data-rv="count"></span></div>
<div class="rv-panes"><div class="rv-list" data-rv="list"></div><div class="rv-detail" data-rv="detail"></div></div>
<script type="application/json" id="rollout-records">[]</script>
<script>{(HERE / "viewer.js").read_text()}</script></section>"""
