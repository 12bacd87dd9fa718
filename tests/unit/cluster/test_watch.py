"""Peak memory of processes; train.profile: when the profiler begins and ends, and what it writes; the timeline: spans,
their clocks, and the rows in which Perfetto shows them.
"""

import asyncio
import gzip
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.backend import Done
from fakes.run import World
from hypothesis import given
from hypothesis import strategies as st

from megarl.cluster.process import DIRECTORY, TIMELINE, Profiler, RankProfiler, find_own_peak, find_peak_of_tree
from megarl.report.timeline import Recording, Span, note, span, split_lanes, start, stop, write_timeline

PHASES = ("rollout", "experience", "update", "checkpoint", "sync", "evaluate")


class RoleHere:
    """A role of one rank in this process's place: what it computes between begin and end is one product."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin_profile(self) -> Done[list[None]]:
        self.calls.append("begin")
        return Done([None])

    def end_profile(self, directory: Path) -> Done[list[Recording]]:
        self.calls.append("end")
        return Done([])


def read(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as file:
        return dict(json.load(file))


def run_profiled(run_dir: Path, iteration: int | None) -> tuple[RoleHere, list[str]]:
    """A run of three iterations over the fakes."""
    role, said = RoleHere(), list[str]()
    with World().open_trainer(run_dir, ["algo=vapo", "train.num_iterations=3", "train.eval_every=1"]) as trainer:
        profiler = Profiler(iteration, [role], run_dir, said.append)
        trainer.report.after_log = profiler.after_log
        trainer.run()
        profiler.close()
    return role, said


def test_phases_nest_in_their_iteration_in_order_and_every_episode_is_there(tmp_path: Path) -> None:
    role, said = run_profiled(tmp_path, 2)
    assert role.calls == ["begin", "end"]
    (text,) = said
    assert text.startswith(f"profile of iteration 2: {TIMELINE} in {tmp_path / DIRECTORY}")
    built = read(tmp_path / DIRECTORY / TIMELINE)
    events = [event for event in built["traceEvents"] if event["ph"] == "X"]
    (iteration,) = [event for event in events if event["name"] == "iteration 2"]
    main = [e for e in events if (e["pid"], e["tid"]) == (iteration["pid"], iteration["tid"]) and e is not iteration]
    phases = [event for event in sorted(main, key=lambda event: event["ts"]) if event["name"] in PHASES]
    assert [phase["name"] for phase in phases] == ["rollout", "experience", "update", "sync", "evaluate"]
    ends = [phase["ts"] + phase["dur"] for phase in phases]
    assert all(end <= later["ts"] for end, later in zip(ends[:-1], phases[1:], strict=True))
    assert iteration["ts"] <= phases[0]["ts"] <= ends[-1] <= iteration["ts"] + iteration["dur"]
    # 6 prompts x 4 responses, and 8 held-out prompts.
    episodes = [event for event in events if event["name"] == "episode"]
    assert len(episodes) == 24 + 8
    assert len([event for event in events if event["name"] == "score"]) == 24 + 8
    assert all(event["args"]["tokens"] > 0 for event in episodes)
    inside = [phases[0], phases[-1]]
    for event in episodes:
        assert any(p["ts"] <= event["ts"] and event["ts"] + event["dur"] <= p["ts"] + p["dur"] for p in inside)


def test_a_run_without_the_iteration_profiles_nothing_and_says_so(tmp_path: Path) -> None:
    for iteration, word in ((None, None), (9, "train.profile=9: this iteration was not run")):
        role, said = run_profiled(tmp_path / str(iteration), iteration)
        assert role.calls == []
        assert not list(tmp_path.glob(f"*/{DIRECTORY}"))
        assert [text.startswith(str(word)) for text in said] == [True] * (word is not None)


def test_a_rank_writes_the_operators_and_spans_of_its_calls(tmp_path: Path) -> None:
    profiler, path = RankProfiler(), tmp_path / "policy-0.json.gz"
    profiler.begin("an iteration that failed", True)
    profiler.begin("policy rank 0/1", True)
    with span("update"):
        torch.ones(8, 8) @ torch.ones(8, 8)
    recording = profiler.end(path)
    assert (recording.process, [each.name for each in recording.spans]) == ("policy rank 0/1", ["update"])
    built = read(path)
    events = {event["name"]: event for event in built["traceEvents"] if event.get("ph") == "X"}
    product, update = events["aten::mm"], events["update"]
    assert update["ts"] <= product["ts"]
    assert product["ts"] + product["dur"] <= update["ts"] + update["dur"]
    # Both kinds of files say which wall clock their 0 is.
    assert abs(built["baseTimeNanoseconds"] + 1000 * update["ts"] - recording.spans[0].start_ns) < 1e9
    assert [each.name for each in tmp_path.iterdir()] == ["policy-0.json.gz"]
    # A rank that is not the first of its stage writes no trace.
    profiler.begin("policy rank 1/2", False)
    with span("update"):
        pass
    assert [each.name for each in profiler.end(tmp_path / "policy-1.json.gz").spans] == ["update"]
    assert [each.name for each in tmp_path.iterdir()] == ["policy-0.json.gz"]


SIZE = 200 * 2**20


def test_the_peak_stays_when_the_memory_is_given_back_and_a_tree_has_that_of_what_its_process_has_started():
    before = find_own_peak()
    array = np.ones(before + SIZE, dtype=np.uint8)
    del array
    assert find_own_peak() >= before + SIZE
    child = f"import sys; x = b'1' * {SIZE}; print('ready', flush=True); sys.stdin.read()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert find_peak_of_tree(process.pid) >= SIZE
        process.stdin.close()
    assert find_peak_of_tree(process.pid) == 0


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
