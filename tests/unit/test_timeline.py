"""The timeline of a run's processes: spans, their clocks, and the rows in which Perfetto shows them."""

import asyncio
import gzip
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl import timeline
from megarl.timeline import Recording, Span, build_timeline, note, span, split_lanes, start, stop, write_timeline


def make_recording(process: str, *spans: tuple[str, int, int], machine: str = "here", offset: int = 0) -> Recording:
    found = [Span(name, begin, end, process, "main", True, {}) for name, begin, end in spans]
    return Recording(process, 1, "host", machine, offset, found)


def list_spans(built: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """(start, end) by name."""
    return {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in built["traceEvents"] if e["ph"] == "X"}


def test_without_a_recording_a_span_does_nothing_and_stop_is_refused() -> None:
    with span("block"):
        pass
    note("block", 0.0, 1.0)
    assert timeline._open == {}
    with pytest.raises(RuntimeError, match="stop without start"):
        stop()


def test_spans_of_a_thread_nest_and_those_of_another_thread_have_a_row_of_their_own() -> None:
    def work() -> None:
        with span("hash"):
            pass

    start("trainer")
    with span("update", samples=4) as details:
        with span("step"):
            thread = threading.Thread(target=work, name="publisher")
            thread.start()
            thread.join()
        details["done"] = True
    recording = stop()
    found = {each.name: each for each in recording.spans}
    assert {name: each.track for name, each in found.items()} == {"update": "main", "step": "main", "hash": "publisher"}
    assert found["update"].args == {"samples": 4, "done": True}
    assert found["update"].start_ns <= found["step"].start_ns <= found["step"].end_ns <= found["update"].end_ns
    assert found["step"].start_ns <= found["hash"].start_ns <= found["hash"].end_ns <= found["step"].end_ns


def test_what_began_before_the_recording_or_outlasts_it_is_cut_to_it() -> None:
    before, after = span("before"), span("after")
    with before:
        start("trainer")
    after.__enter__()
    recording = stop()
    after.__exit__(None, None, None)
    found = {each.name: each for each in recording.spans}
    assert found["before"].args == {"begun_before": True}
    assert found["after"].args == {"not_ended": True}
    assert len(recording.spans) == 2


def test_overlapping_spans_of_coroutines_are_shown_in_several_rows_without_overlap() -> None:
    async def ask(seconds: float) -> None:
        with span("request", process="server", track="requests"):
            await asyncio.sleep(seconds)

    async def ask_all() -> None:
        await asyncio.gather(*(ask(0.01 * n) for n in (1, 2, 3)))

    start("trainer")
    asyncio.run(ask_all())
    built = build_timeline([stop()], {})
    requests = [event for event in built["traceEvents"] if event["name"] == "request"]
    assert len({event["tid"] for event in requests}) == 3
    names = {e["args"]["name"] for e in built["traceEvents"] if e["name"] == "thread_name"}
    assert names == {"requests", "requests 2", "requests 3"}
    processes = [e["args"]["name"] for e in built["traceEvents"] if e["name"] == "process_name"]
    assert processes[0].startswith("trainer (process ")
    assert processes[1:] == ["server"]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=25), st.booleans())
def test_within_a_row_spans_contain_or_exclude_each_other(pairs: list[tuple[int, int]], nests: bool) -> None:
    shown = make_recording("p", ("x", 0, 0)).spans[0]
    spans = [(begin, begin + length, shown) for begin, length in pairs]
    lanes = split_lanes(spans, nests)
    assert sorted(entry[:2] for lane in lanes for entry in lane) == sorted(entry[:2] for entry in spans)
    for lane in lanes:
        for n, (begin, end, _) in enumerate(lane):
            for other_begin, other_end, _ in lane[n + 1 :]:
                excludes = other_begin >= end
                contains = begin <= other_begin and other_end <= end
                assert excludes or (nests and contains)


def test_processes_of_one_machine_have_one_clock() -> None:
    """A child's span is within the one in which its parent waits for it, by the times that each has noted itself."""
    child = (
        "import dataclasses, json\nfrom megarl.timeline import *\nstart('rank')\n"
        "with span('call'): pass\nprint(json.dumps(dataclasses.asdict(stop())))"
    )
    start("trainer")
    with span("wait"):
        output = subprocess.run([sys.executable, "-c", child], check=True, capture_output=True, text=True).stdout
    own = stop()
    found = json.loads(output)
    spans = [Span(**each) for each in found.pop("spans")]
    other = Recording(**found, spans=spans)
    assert other.machine == own.machine
    times = list_spans(build_timeline([own, other], {}))
    assert times["wait"][0] <= times["call"][0] <= times["call"][1] <= times["wait"][1]


def test_a_process_of_another_machine_is_placed_by_the_wall_clocks() -> None:
    own = make_recording("trainer", ("update", 1_000_000, 9_000_000), offset=500_000_000)
    # This machine was started 300 ms later: its monotonic clock shows less at the same time.
    other = make_recording("rank", ("call", -298_000_000, -297_000_000), machine="there", offset=800_000_000)
    built = build_timeline([own, other], {"iteration": 2})
    assert list_spans(built) == {"update": (0.0, 8000.0), "call": (1000.0, 2000.0)}
    assert built["otherData"] == {"baseTimeNanoseconds": 501_000_000, "iteration": 2}


def test_the_wall_clock_of_a_span_is_that_at_which_it_was_noted(tmp_path: Path) -> None:
    before = time.time_ns()
    start("trainer")
    with span("block"):
        pass
    write_timeline(tmp_path / "timeline.json.gz", [stop()], {})
    after = time.time_ns()
    with gzip.open(tmp_path / "timeline.json.gz", "rt") as file:
        built = json.load(file)
    begin, end = (built["otherData"]["baseTimeNanoseconds"] + 1000 * t for t in list_spans(built)["block"])
    slack = 10**9  # NTP may move the wall clock meanwhile
    assert before - slack < begin <= end < after + slack
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.json.gz"]
