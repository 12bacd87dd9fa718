"""The most bytes that a process's tensors take, by phase: what a plan's memory is compared with."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

PHASE = "megarl-phase: "
COLLECTIVES = ("c10d::", "gloo:")
"""Beginnings of the names of the events in which collectives run"""


class PeakMeter:
    """Bytes of tensors on this process's GPU or, without one, in torch's allocator on the CPU, whose allocations the
    profiler records; above those at the start of the measurement.
    """

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        """Most bytes in each phase; on a CPU complete at the end of `measuring`"""
        self._before = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the measurement, from here to the end of the block. Raises ValueError for a name used before."""
        if name in self.peaks:
            raise ValueError(f"a phase {name!r} was measured before")
        self.peaks[name] = 0
        if not torch.cuda.is_available():
            with torch.profiler.record_function(f"{PHASE}{name}"):
                yield
            return
        torch.cuda.reset_peak_memory_stats()
        yield
        self.peaks[name] = torch.cuda.max_memory_allocated() - self._before


@contextmanager
def measuring_peaks() -> Iterator[PeakMeter]:
    """Measure the phases in the block. On a CPU the profiler slows it down and keeps what it records in memory."""
    meter = PeakMeter()
    gc.collect()
    if torch.cuda.is_available():
        meter._before = torch.cuda.memory_allocated()
        yield meter
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield meter
    meter.peaks = find_peaks(profile)


def find_peaks(profile: torch.profiler.profile) -> dict[str, int]:
    """Most bytes that were held at once in each phase, without gloo's own copies of what it sends: NCCL makes none, and
    whether gloo's thread frees one, which is not recorded, or this one does is chance.
    """
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    # Any: torch's stubs know of each event's fields only what all kinds have in common.
    pending: list[tuple[Any, bool]] = [
        (event, False) for event in profile.profiler.kineto_results.experimental_event_tree()
    ]
    phases, allocations = [], []
    while pending:
        event, in_collective = pending.pop()
        in_collective = in_collective or event.name.startswith(COLLECTIVES)
        pending += [(child, in_collective) for child in event.children]
        if event.name == "[memory]":
            fields = event.extra_fields
            allocations.append((event.start_time_ns, fields.ptr, 0 if in_collective else fields.alloc_size))
        elif event.name.startswith(PHASE):
            phases.append((event.name.removeprefix(PHASE), event.start_time_ns, event.end_time_ns))
    held: dict[int, int] = {}
    total, totals = 0, []
    for time, place, size in sorted(allocations, key=lambda allocation: allocation[0]):
        total -= held.pop(place, 0)
        if size > 0:
            held[place] = size
            total += size
        totals.append((time, total))
    return {name: _find_peak(totals, start, end) for name, start, end in sorted(phases, key=lambda phase: phase[1])}


def _find_peak(totals: list[tuple[int, int]], start: int, end: int) -> int:
    """The largest total from start to end; what was held before the start is held then too."""
    peak = 0
    for time, total in totals:
        if time < start:
            peak = total
        elif time <= end:
            peak = max(peak, total)
    return peak
