"""What the ranks of a role are doing when one of them is late: the call, its duration, and the stack."""

import faulthandler
import linecache
import os
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

ANSWER_S = 10.0
"""How long a rank may take to report its state: a thread of its own does nothing else."""
NUM_FRAMES = 14
"""The number of innermost frames shown of a stack."""


@dataclass(frozen=True)
class CallState:
    """The call that a rank is executing."""

    verb: str
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
        return CallState(verb, time.monotonic() - since, tuple(reversed(frames)))


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
        ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=ANSWER_S)
        together: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(list)
        seconds: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
        for number, ref in refs.items():
            state = self._read(ref, number) if ref in ready else self._describe_silent(number)
            key = (state.verb, state.frames)
            together[key].append(number)
            seconds[key] = max(seconds[key], state.seconds)
        return "\n".join(
            f"{', '.join(self.names[n] for n in numbers)}: {verb}"
            + (f" for {seconds[verb, frames]:.0f} s, at" if frames else "")
            + "".join(f"\n    {frame}" for frame in frames)
            for (verb, frames), numbers in together.items()
        )

    def _read(self, ref: ray.ObjectRef[CallState | None], number: int) -> CallState:
        try:
            state = ray.get(ref)
        except ray.exceptions.RayActorError:
            return CallState("its process has died", 0.0, ())
        if state is None:
            return CallState("in no call", 0.0, ())
        return CallState(f"in {state.verb}", state.seconds, state.frames)

    def _describe_silent(self, number: int) -> CallState:
        """The state of a rank that does not answer: that of its process, where it runs on this machine."""
        ready, _ = ray.wait([self.identities[number]], timeout=0)
        if not ready:
            return CallState("its process has not started", 0.0, ())
        try:
            host, pid = ray.get(ready[0])
        except ray.exceptions.RayActorError:
            return CallState("its process has died", 0.0, ())
        silent = f"gives no stack; its process {pid} on {host}"
        if host != socket.gethostname():
            return CallState(f"{silent} cannot be seen from here", 0.0, ())
        try:
            state = psutil.Process(pid).status()
            if state != psutil.STATUS_STOPPED:
                os.kill(pid, signal.SIGUSR1)
                silent = f"its stack is at the end of {self.logs[number]}; its process {pid} on {host}"
        except (psutil.NoSuchProcess, ProcessLookupError):
            return CallState("its process has died", 0.0, ())
        return CallState(f"{silent} is {state}", 0.0, ())
