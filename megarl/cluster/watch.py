"""What processes do: stacks of ranks that are late, the most memory of each, and a profile of one iteration."""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
import torch
from torch.profiler import profile, record_function

from megarl import timeline
from megarl.cluster.calls import WorkerError, ask, wait_for
from megarl.interfaces import DeadlineError, wait_all
from megarl.timeline import Recording, write_timeline

if TYPE_CHECKING:
    from megarl.types import Metrics

ANSWER_S = 10.0
"""How long a rank may take to report its state: a thread of its own does nothing else."""
NUM_FRAMES = 14
"""The number of innermost frames shown of a stack."""


@dataclass(frozen=True)
class CallState:
    """The call that a rank is executing."""

    verb: str
    """As `in logprobs`"""
    seconds: float
    """Since the call began"""
    frames: tuple[str, ...]
    """Innermost last"""


class CallTracker:
    """Records which call this process executes. `enter` runs in the thread of the calls, `find_state` in another."""

    def __init__(self) -> None:
        self._current: tuple[str, float, int] | None = None

    @contextmanager
    def enter(self, verb: str) -> Iterator[None]:
        self._current = (verb, time.monotonic(), threading.get_ident())
        try:
            yield
        finally:
            self._current = None

    def find_state(self) -> CallState | None:
        """The state of the current call; None between calls."""
        if self._current is None:
            return None
        verb, since, thread = self._current
        frames: list[str] = []
        frame = sys._current_frames().get(thread)
        while frame is not None and len(frames) < NUM_FRAMES and frame.f_code.co_filename != __file__:
            path, line = frame.f_code.co_filename, frame.f_lineno
            code = linecache.getline(path, line).strip()
            frames.append(f"{'/'.join(Path(path).parts[-3:])}:{line} {frame.f_code.co_name}: {code}")
            frame = frame.f_back
        return CallState(f"in {verb}", time.monotonic() - since, tuple(reversed(frames)))


def dump_on_signal() -> None:
    """Make SIGUSR1 write the stacks of all threads to stderr, even while native code holds Python's lock."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def identify() -> tuple[str, int]:
    """(host, process id) of this process."""
    return socket.gethostname(), os.getpid()


@dataclass(frozen=True)
class RankStacks:
    """Collects the stacks of a role's actors, whose methods `find_state` and `identify` run beside other calls."""

    actors: Sequence[ray.actor.ActorHandle[Any]]
    names: Sequence[str]
    identities: Sequence[ray.ObjectRef[tuple[str, int]]]
    """The results of each actor's `identify`, called at its start, after `dump_on_signal`"""
    logs: Sequence[Path]
    """The log file of each rank"""

    def explain(self, numbers: Sequence[int]) -> str:
        """Describe what the ranks with these numbers are doing; ranks with the same stack share a paragraph.

        It takes at most `ANSWER_S` for all of them together.
        """
        refs: dict[int, ray.ObjectRef[CallState | None]] = {
            number: self.actors[number].find_state.remote() for number in numbers
        }
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=ANSWER_S)
        together: dict[tuple[str, tuple[str, ...]], dict[str, float]] = defaultdict(dict)
        for number, ref in refs.items():
            try:
                state = ray.get(ref, timeout=0) or CallState("in no call", 0.0, ())
            except ray.exceptions.GetTimeoutError:
                state = CallState(self._describe_silent(number), 0.0, ())
            except ray.exceptions.RayActorError:
                state = CallState("its process has died", 0.0, ())
            together[state.verb, state.frames][self.names[number]] = state.seconds
        return "\n".join(
            f"{', '.join(ranks)}: {verb}"
            + (f" for {max(ranks.values()):.0f} s, at" if frames else "")
            + "".join(f"\n    {frame}" for frame in frames)
            for (verb, frames), ranks in together.items()
        )

    def _describe_silent(self, number: int) -> str:
        """The state of a rank that does not answer: that of its process, where it runs on this machine."""
        try:
            host, pid = ray.get(self.identities[number], timeout=0)
            if host != socket.gethostname():
                return f"gives no stack; its process {pid} on {host} cannot be seen from here"
            state = psutil.Process(pid).status()
            if state == psutil.STATUS_STOPPED:
                return f"gives no stack; its process {pid} on {host} is {state}"
            os.kill(pid, signal.SIGUSR1)
        except ray.exceptions.GetTimeoutError:
            return "its process has not started"
        except (ray.exceptions.RayActorError, psutil.NoSuchProcess, ProcessLookupError):
            return "its process has died"
        return f"its stack is at the end of {self.logs[number]}; its process {pid} on {host} is {state}"


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


def measure_peaks(groups: Mapping[str, Any]) -> Metrics:
    """perf/NAME_peak_memory_gb of each role or the servers: that of its process with the most, since that started.

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


DIRECTORY = "profile"
TIMELINE = "timeline.json.gz"


class RankProfiler:
    """Rank-local half of the profiler: records the calls of one rank and, on some ranks, torch's operators in them."""

    def __init__(self) -> None:
        self._profile: profile | None = None

    def begin(self, process: str, with_operators: bool) -> None:
        """Record from here on, in the calling thread. process: what this one is called in the timeline."""
        if self._profile is not None:  # of an iteration that failed
            self._profile.stop()
            self._profile = None
        if with_operators:
            # Otherwise Python's object of each event is built too, which takes minutes and gigabytes.
            fast = torch.profiler._ExperimentalConfig(trace_only=True)
            self._profile = profile(experimental_config=fast)
            self._profile.start()
        timeline.start(process, record_function if with_operators else contextlib.nullcontext)

    def end(self, path: Path) -> Recording:
        """End the recording, and write torch's trace to `path` (.json.gz), which appears atomically."""
        recording = timeline.stop()
        if self._profile is not None:
            self._profile.stop()
            building = path.with_name(f".{path.name}")
            self._profile.export_chrome_trace(str(building))
            building.rename(path)
            self._profile = None
        return recording


class Profiler:
    """Profiles one iteration into RUN_DIR/profile."""

    def __init__(
        self,
        iteration: int | None,
        roles: Iterable[Any],
        run_dir: Path,
        say: Callable[[str], None],
    ) -> None:
        """iteration: train.profile; None: nothing is profiled. roles: `WorkerGroup`s."""
        self._iteration, self._roles, self._directory, self._say = iteration, list(roles), run_dir / DIRECTORY, say
        self._started: float | None = None

    def after_log(self, iteration: int) -> None:
        """Begin before the iteration to profile, and end after it; `Report.after_log` is to call this."""
        if self._iteration is None:
            return
        if self._started is not None and iteration == self._iteration:
            timeline.note(f"iteration {iteration}", self._started, time.monotonic())
            self._write(timeline.stop())
        if iteration == self._iteration - 1:
            wait_all([role.begin_profile() for role in self._roles])
            timeline.start("trainer")
            self._started = time.monotonic()

    def _write(self, own: Recording) -> None:
        self._directory.mkdir(exist_ok=True)
        ends = [role.end_profile(self._directory) for role in self._roles]
        wait_all(ends)
        recordings = [own, *(recording for each in ends for recording in each.result())]
        write_timeline(self._directory / TIMELINE, recordings, {"iteration": self._iteration})
        names = ", ".join(sorted(path.name for path in self._directory.glob("*.json.gz")))
        self._say(f"profile of iteration {self._iteration}: {names} in {self._directory}; ui.perfetto.dev opens them")

    def close(self) -> None:
        """Say where the iteration to profile was not run: a resumed run is past it, or the run ended before."""
        if self._iteration is not None and not (self._directory / TIMELINE).is_file():
            self._say(f"train.profile={self._iteration}: this iteration was not run to its end; there is no profile")
