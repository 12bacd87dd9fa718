"""Spans of time in which a process does something, and one timeline of all processes in Chrome's trace-event format.

`span` may be used anywhere; what it notes is kept only while a recording is on (`start` to `stop`, train.profile).
Spans have the times of the wall clock, which NTP keeps within a few milliseconds of that of other machines.

The format has complete events and metadata; Perfetto (https://ui.perfetto.dev) opens it.
"""

import contextlib
import gzip
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

MAIN = "main"
"""The track of the thread that started the recording"""
Annotate = Callable[[str], contextlib.AbstractContextManager[Any]]
RESPONSES = "responses"
"""The process that responses are shown with, which come from several at a time"""


@dataclass(frozen=True)
class Span:
    """Something that a process did, or waited for, from `start_ns` to `end_ns` (ns since 1970)."""

    name: str
    start_ns: int
    end_ns: int
    process: str
    """The process that it is shown with: the recording one's (also where this is empty), or that of a server"""
    track: str
    """A row of the process"""
    nests: bool
    """Whether the spans of the track are those of one thread, of which each contains or excludes each other"""
    args: Mapping[str, Any]
    """Details, in JSON's types"""


@dataclass(frozen=True)
class Recording:
    process: str
    pid: int
    host: str
    spans: Sequence[Span]


class _Recorder:
    def __init__(self, process: str, annotate: Annotate) -> None:
        self.process, self.annotate = process, annotate
        self.thread = threading.current_thread().name
        self.start_ns = time.time_ns()
        self.spans: list[Span] = []

    def add(self, span: Span, end_ns: int, **args: Any) -> None:
        if end_ns < self.start_ns:
            return
        if span.start_ns < self.start_ns:
            args["begun_before"] = True
        track = MAIN if span.nests and span.track == self.thread else span.track
        start_ns, process = max(span.start_ns, self.start_ns), span.process or self.process
        args = {**span.args, **args}
        self.spans.append(replace(span, start_ns=start_ns, end_ns=end_ns, process=process, track=track, args=args))


_recorder: _Recorder | None = None
_open: dict[int, Span] = {}
_numbers = itertools.count()


@contextlib.contextmanager
def span(name: str, *, process: str = "", track: str | None = None, **args: Any) -> Iterator[dict[str, Any]]:
    """Note the time of the block; also a decorator. Gives the span's details, to which the block may add.

    process: that it is shown with; empty: this one. track: the row of the process, whose spans may overlap; None: that
    of this thread, for a block in which no other coroutine runs. args: details, in JSON's types.
    """
    number, nests = next(_numbers), track is None
    _open[number] = opened = Span(
        name, time.time_ns(), 0, process, track or threading.current_thread().name, nests, args
    )
    # What awaits is no nested block of its thread, as annotations must be.
    annotate = _recorder.annotate if _recorder is not None and nests else contextlib.nullcontext
    try:
        with annotate(name):
            yield args
    finally:
        del _open[number]
        if (recorder := _recorder) is not None:
            recorder.add(opened, time.time_ns())


def note(name: str, start_s: float, end_s: float) -> None:
    """As a `span` of this thread that has ended; times: of time.monotonic, in seconds."""
    if (recorder := _recorder) is not None:
        offset = time.time_ns() - time.monotonic_ns()
        start_ns, end_ns = (offset + round(at * 1e9) for at in (start_s, end_s))
        recorder.add(Span(name, start_ns, 0, "", threading.current_thread().name, True, {}), end_ns)


def start(process: str, annotate: Annotate = contextlib.nullcontext) -> None:
    """Record this process's spans from here on, those that have begun included; what was being recorded is dropped.

    process: what it is called in the timeline. annotate: entered with its name for each span of a thread.
    """
    global _recorder
    _recorder = _Recorder(process, annotate)


def stop() -> Recording:
    """End the recording; spans that have not ended are in it up to here. Raises RuntimeError where there is none."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is None:
        raise RuntimeError("timeline: stop without start")
    now = time.time_ns()
    for opened in list(_open.values()):
        recorder.add(opened, now, not_ended=True)
    return Recording(recorder.process, os.getpid(), socket.gethostname(), tuple(recorder.spans))


def write_timeline(path: Path, recordings: Sequence[Recording], about: Mapping[str, Any]) -> None:
    """Write the recordings to a .json.gz, which appears atomically; times count from the first span of all, in us.

    about: goes into `otherData`, beside baseTimeNanoseconds, the wall clock (ns since 1970) of the timeline's 0;
    torch's traces have it too.
    """
    rows: dict[str, dict[tuple[bool, str, bool], list[Span]]] = {each.process: {} for each in recordings}
    spans = [each for recording in recordings for each in recording.spans]
    for each in spans:
        rows.setdefault(each.process, {}).setdefault((each.track != MAIN, each.track, each.nests), []).append(each)
    zero = min((each.start_ns for each in spans), default=0)
    known = {each.process: f"{each.process} (process {each.pid} on {each.host})" for each in recordings}
    events: list[dict[str, Any]] = []
    for pid, (process, tracks) in enumerate(rows.items(), start=1):
        events += _name("process", pid, 0, known.get(process, process))
        tids = itertools.count(1)
        for (_, track, nests), found in sorted(tracks.items()):
            for number, lane in enumerate(split_lanes(found, nests), start=1):
                tid = next(tids)
                events += _name("thread", pid, tid, track if number == 1 else f"{track} {number}")
                for each in lane:
                    times = {"ts": (each.start_ns - zero) / 1000, "dur": (each.end_ns - each.start_ns) / 1000}
                    place = {"ph": "X", "pid": pid, "tid": tid, "name": each.name, "args": dict(each.args)}
                    events.append(place | times)
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"baseTimeNanoseconds": zero, **about}}
    building = path.with_name(f".{path.name}")
    with gzip.open(building, "wt", encoding="utf-8") as file:
        json.dump(content, file)
    building.rename(path)


def split_lanes(spans: Iterable[Span], nests: bool) -> list[list[Span]]:
    """The spans of a track in rows: in each one each contains or excludes each other, or, where they do not nest, none
    overlaps another.
    """
    rows: list[tuple[list[Span], list[int]]] = []
    """Of each row, its spans and the ends of those that the next one would be in"""
    for each in sorted(spans, key=lambda each: (each.start_ns, -each.end_ns)):
        for _, open_ends in rows:
            while open_ends and open_ends[-1] <= each.start_ns:
                open_ends.pop()
        row = next((row for row in rows if not row[1] or (nests and each.end_ns <= row[1][-1])), None)
        if row is None:
            rows.append(row := ([], []))
        row[0].append(each)
        row[1].append(each.end_ns)
    return [found for found, _ in rows]


def _name(kind: str, pid: int, tid: int, name: str) -> list[dict[str, Any]]:
    """The events that name a process or a thread, and place it in the order of their numbers."""
    about = {"ph": "M", "pid": pid, "tid": tid}
    return [
        about | {"name": f"{kind}_name", "args": {"name": name}},
        about | {"name": f"{kind}_sort_index", "args": {"sort_index": tid or pid}},
    ]
