"""The timeline of a run's processes: spans, their clocks, and the rows in which Perfetto shows them."""

import asyncio
import gzip
import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.report.timeline import Span, note, span, split_lanes, start, stop, write_timeline


def test_without_a_recording_a_span_does_nothing_and_stop_is_refused() -> None:
    with span("block"):
        note("noted", 0.0, 1.0)
    with pytest.raises(RuntimeError, match="stop without start"):
        stop()


def test_spans_of_a_thread_nest_and_are_cut_to_the_recording_and_other_threads_have_their_own_row() -> None:
    before, after = span("before"), span("after")
    with before:
        start("trainer")
    with span("update", samples=4) as details:
        thread = threading.Thread(target=span("hash")(lambda: None), name="publisher")
        thread.start()
        thread.join()
        details["done"] = True
    now = time.monotonic()
    note("noted", now - 5.0, now)
    after.__enter__()
    found = {each.name: each for each in stop().spans}
    after.__exit__(None, None, None)
    assert {name: each.track for name, each in found.items()} == {
        **dict.fromkeys(("before", "update", "noted", "after"), "main"),
        "hash": "publisher",
    }
    assert found["update"].args == {"samples": 4, "done": True}
    assert found["before"].args == found["noted"].args == {"begun_before": True}
    assert found["after"].args == {"not_ended": True}
    assert found["update"].start_ns <= found["hash"].start_ns <= found["hash"].end_ns <= found["update"].end_ns


def test_the_file_has_all_processes_on_the_wall_clock_and_overlapping_spans_in_several_rows(tmp_path: Path) -> None:
    async def ask(seconds: float) -> None:
        with span("request", process="server", track="requests"):
            await asyncio.sleep(seconds)

    async def ask_all() -> None:
        await asyncio.gather(*(ask(0.01 * n) for n in (1, 2, 3)))

    before = time.time_ns()
    start("trainer")
    asyncio.run(ask_all())
    write_timeline(tmp_path / "timeline.json.gz", [stop()], {"iteration": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.json.gz"]
    with gzip.open(tmp_path / "timeline.json.gz", "rt") as file:
        built = json.load(file)
    events = built["traceEvents"]
    requests = [event for event in events if event["name"] == "request"]
    assert len({event["tid"] for event in requests}) == 3
    assert min(event["ts"] for event in requests) == 0
    assert built["otherData"]["iteration"] == 2
    base = built["otherData"]["baseTimeNanoseconds"]
    assert before <= base < base + 1000 * max(event["dur"] for event in requests) <= time.time_ns()
    names = {kind: [e["args"]["name"] for e in events if e["name"] == f"{kind}_name"] for kind in ("thread", "process")}
    assert names["thread"] == ["requests", "requests 2", "requests 3"]
    assert names["process"][0].startswith("trainer (process ")
    assert names["process"][1:] == ["server"]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=25), st.booleans())
def test_within_a_row_spans_contain_or_exclude_each_other(pairs: list[tuple[int, int]], nests: bool) -> None:
    spans = [Span("x", begin, begin + length, "p", "main", nests, {}) for begin, length in pairs]
    lanes = [[(each.start_ns, each.end_ns) for each in lane] for lane in split_lanes(spans, nests)]
    assert sorted(entry for lane in lanes for entry in lane) == sorted((b, b + length) for b, length in pairs)
    for lane in lanes:
        for n, (begin, end) in enumerate(lane):
            for other_begin, other_end in lane[n + 1 :]:
                contains = begin <= other_begin and other_end <= end
                assert other_begin >= end or (nests and contains)
