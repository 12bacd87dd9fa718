"""Spans of time in which a process does something, and one timeline of all processes in Chrome's trace-event format.

`span` may be used anywhere; what it notes is kept only while a recording is on (`start` to `stop`, train.profile).
Spans have the times of CLOCK_MONOTONIC, which on Linux is one clock for all processes of a machine and which nobody
sets. Where a process ran on another machine than the first one, its times are moved by what the two machines' wall
clocks say, which NTP keeps within a few milliseconds of each other.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (complete events and
metadata). Perfetto (https://ui.perfetto.dev) opens it.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Holds what tells one start of one machine from all others"""
MAIN = "main"
"""The track of the thread that started the recording"""
Annotate = Callable[[str], contextlib.AbstractContextManager[Any]]
RESPONSES = "responses"
"""The process that responses are shown with, which come from several at a time"""


@dataclass(frozen=True)
class Span:
    """Something that a process did, or waited for, from `start_ns` to `end_ns` of this machine's CLOCK_MONOTONIC."""

    name: str
    start_ns: int
    end_ns: int
    process: str
    """The process that it is shown with: the recording one's, or that of a server that was asked"""
    track: str
    """A row of the process"""
    nests: bool
    """Whether the spans of the track are those of one thread, of which each contains or excludes each other"""
    args: Mapping[str, Any]
    """Details, in JSON's types"""


@dataclass(frozen=True)
class Recording:
    """The spans of one process."""

    process: str
    pid: int
    host: str
    machine: str
    """The same for all processes that share a CLOCK_MONOTONIC"""
    unix_offset_ns: int
    """The wall clock (ns since 1970) minus CLOCK_MONOTONIC at the start of the recording"""
    spans: Sequence[Span]


@dataclass(frozen=True)
class _Open:
    name: str
    start_ns: int
    thread: threading.Thread
    process: str | None
    track: str | None
    args: dict[str, Any]


class _Recorder:
    def __init__(self, process: str, annotate: Annotate) -> None:
        self.process, self.annotate = process, annotate
        self.thread = threading.current_thread()
        self.start_ns = time.monotonic_ns()
        self.unix_offset_ns = time.time_ns() - time.monotonic_ns()
        self.spans: list[Span] = []

    def add(self, span: _Open, end_ns: int, **args: Any) -> None:
        if end_ns < self.start_ns:
            return
        if span.start_ns < self.start_ns:
            args["begun_before"] = True
        track = span.track or (MAIN if span.thread is self.thread else span.thread.name)
        self.spans.append(
            Span(
                name=span.name,
                start_ns=max(span.start_ns, self.start_ns),
                end_ns=end_ns,
                process=span.process or self.process,
                track=track,
                nests=span.track is None,
                args=span.args | args,
            )
        )


_recorder: _Recorder | None = None
_open: dict[int, _Open] = {}
_numbers = itertools.count()


@contextlib.contextmanager
def span(name: str, *, process: str | None = None, track: str | None = None, **args: Any) -> Iterator[dict[str, Any]]:
    """Note the time of the block; also a decorator. Gives the span's details, to which the block may add.

    process: that it is shown with; None: this one. track: the row of the process, whose spans may overlap; None: that
    of this thread, for a block in which no other coroutine runs. args: details, in JSON's types.
    """
    number, opened = next(_numbers), _Open(name, time.monotonic_ns(), threading.current_thread(), process, track, args)
    _open[number] = opened
    # What awaits is no nested block of its thread, as annotations must be.
    annotate = _recorder.annotate if _recorder is not None and track is None else contextlib.nullcontext
    try:
        with annotate(name):
            yield args
    finally:
        del _open[number]
        if (recorder := _recorder) is not None:
            recorder.add(opened, time.monotonic_ns())


def note(name: str, start_s: float, end_s: float) -> None:
    """As a `span` of this thread that has ended; times: of time.monotonic, in seconds."""
    if (recorder := _recorder) is not None:
        opened = _Open(name, round(start_s * 1e9), threading.current_thread(), None, None, {})
        recorder.add(opened, round(end_s * 1e9))


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
    now = time.monotonic_ns()
    for opened in list(_open.values()):
        recorder.add(opened, now, not_ended=True)
    machine = BOOT_ID.read_text().strip()
    host = socket.gethostname()
    return Recording(recorder.process, os.getpid(), host, machine, recorder.unix_offset_ns, tuple(recorder.spans))


def write_timeline(path: Path, recordings: Sequence[Recording], about: Mapping[str, Any]) -> None:
    """Write `build_timeline` to a .json.gz, which appears atomically."""
    building = path.with_name(f".{path.name}")
    with gzip.open(building, "wt", encoding="utf-8") as file:
        json.dump(build_timeline(recordings, about), file)
    building.rename(path)


def build_timeline(recordings: Sequence[Recording], about: Mapping[str, Any]) -> dict[str, Any]:
    """The recordings in Chrome's trace-event format; times count from the first span of all, in microseconds.

    recordings: the first one is of the process by whose clocks the others are placed. about: goes into `otherData`,
    beside baseTimeNanoseconds, the wall clock (ns since 1970) of the timeline's 0; torch's traces have it too.
    """
    first = recordings[0]
    shifts = [0 if each.machine == first.machine else each.unix_offset_ns - first.unix_offset_ns for each in recordings]
    rows: dict[str, dict[tuple[str, bool], list[tuple[int, int, Span]]]] = {each.process: {} for each in recordings}
    for recording, shift in zip(recordings, shifts, strict=True):
        for each in recording.spans:
            tracks = rows.setdefault(each.process, {})
            tracks.setdefault((each.track, each.nests), []).append((each.start_ns + shift, each.end_ns + shift, each))
    zero = min((start for tracks in rows.values() for row in tracks.values() for start, _, _ in row), default=0)
    known = {each.process: f"{each.process} (process {each.pid} on {each.host})" for each in recordings}
    events: list[dict[str, Any]] = []
    for pid, (process, tracks) in enumerate(rows.items(), start=1):
        events += _name(pid, None, known.get(process, process))
        tids = itertools.count(1)
        for (track, nests), spans in sorted(tracks.items(), key=lambda item: (item[0][0] != MAIN, item[0][0])):
            for number, lane in enumerate(split_lanes(spans, nests)):
                tid = next(tids)
                events += _name(pid, tid, track if number == 0 else f"{track} {number + 1}")
                events += [_describe(pid, tid, start - zero, end - zero, each) for start, end, each in lane]
    base = zero + first.unix_offset_ns
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"baseTimeNanoseconds": base, **about},
    }


def split_lanes(spans: Iterable[tuple[int, int, Span]], nests: bool) -> list[list[tuple[int, int, Span]]]:
    """The (start, end, span) of a track in rows: in each one each contains or excludes each other, or, where they do
    not nest, none overlaps another.
    """
    rows: list[tuple[list[tuple[int, int, Span]], list[int]]] = []
    """Of each row, its entries and the ends of those that the next one would be in"""
    for entry in sorted(spans, key=lambda entry: (entry[0], -entry[1])):
        start, end, _ = entry
        for _, open_ends in rows:
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
        row = next((row for row in rows if not row[1] or (nests and end <= row[1][-1])), None)
        if row is None:
            row = ([], [])
            rows.append(row)
        row[0].append(entry)
        row[1].append(end)
    return [entries for entries, _ in rows]


def _name(pid: int, tid: int | None, name: str) -> list[dict[str, Any]]:
    """The events that name a process or a thread, and place it in the order of their numbers."""
    kind, number = ("process", pid) if tid is None else ("thread", tid)
    about = {"ph": "M", "pid": pid, "tid": tid or 0}
    return [
        about | {"name": f"{kind}_name", "args": {"name": name}},
        about | {"name": f"{kind}_sort_index", "args": {"sort_index": number}},
    ]


def _describe(pid: int, tid: int, start_ns: int, end_ns: int, each: Span) -> dict[str, Any]:
    times = {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
    return {"ph": "X", "pid": pid, "tid": tid, "name": each.name, **times, "args": dict(each.args)}
