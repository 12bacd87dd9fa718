"""train.profile: a trace of one iteration by torch's profiler for each role, and one timeline of all processes."""

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megarl import timeline
from megarl.interfaces import Pending, wait_all
from megarl.timeline import Recording, write_timeline

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
            on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            # Otherwise Python's object of each event is built too, which takes minutes and gigabytes.
            fast = torch.profiler._ExperimentalConfig(trace_only=True)
            self._profile = profile(activities=[ProfilerActivity.CPU, *on_gpu], experimental_config=fast)
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


class ProfiledRole(Protocol):
    """A role whose ranks can be profiled."""

    def begin_profile(self) -> Pending[list[None]]:
        """Record from here on: the calls of every rank, and torch's operators on the first rank of each pipeline
        stage.
        """
        ...

    def end_profile(self, directory: Path) -> Pending[list[Recording]]:
        """What every rank recorded; torch's traces are written to ROLE-RANK.json.gz."""
        ...


class Profiler:
    """Profiles one iteration into RUN_DIR/profile."""

    def __init__(
        self,
        iteration: int | None,
        roles: Iterable[ProfiledRole],
        run_dir: Path,
        say: Callable[[str], None],
    ) -> None:
        """iteration: train.profile; None: nothing is profiled."""
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
