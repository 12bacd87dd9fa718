"""The most memory that the processes of a run have had, for perf/*_peak_memory_gb."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import psutil
import ray

from megarl.cluster.ray_calls import ask
from megarl.cluster.waiting import WorkerError, wait_for
from megarl.interfaces import DeadlineError

if TYPE_CHECKING:
    from megarl.types import Metrics

DEADLINE_S = 10.0
"""Of an answer, which a thread of its own gives; without one the number is left out"""
PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def find_own_peak() -> int:
    """Bytes: of this process's tensors on its GPU, where it uses one, else of its resident memory."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return _read_peak(psutil.Process().pid)


def find_peak_of_tree(pid: int) -> int:
    """Bytes of resident memory of this process and those that it has started, each at its own most."""
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        return sum(_read_peak(each.pid) for each in (first, *first.children(recursive=True)))
    return 0


def _read_peak(pid: int) -> int:
    with suppress(OSError):
        found = PEAK.search(Path(f"/proc/{pid}/status").read_text())
        return 1024 * int(found[1]) if found else 0
    return 0


class Measured(Protocol):
    """Processes of one kind: a role's, or the servers."""

    def ask_peaks(self) -> Sequence[ray.ObjectRef[int]]:
        """Ask each for its bytes."""
        ...


def measure_peaks(groups: Mapping[str, Measured]) -> Metrics:
    """perf/NAME_peak_memory_gb of each group: that of its process with the most, since that process started.

    Raises RayLostError.
    """
    metrics: Metrics = {}
    for name, group in groups.items():
        what = f"memory of the {name} processes"
        # A process that is gone or late is named by the loop's own calls, which know what to do about it.
        with suppress(WorkerError, DeadlineError):
            refs = ask(what, group.ask_peaks)
            peak = max(wait_for(refs, [name] * len(refs), what, DEADLINE_S))
            metrics[f"perf/{name}_peak_memory_gb"] = peak / 2**30
    return metrics
