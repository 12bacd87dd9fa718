"""Calls of Ray and waits for them: each has a deadline, fails as soon as one fails, and names what it waited for; and
the process that owns a local Ray, which listens on the loopback interface alone.

    python -m megarl.cluster.calls TEMP_DIR CPUS BYTES

Ray's own calls are native code that waits for its processes without a deadline: a call runs in a thread, while the
caller waits and can be interrupted by a signal.

The owner is started by `opened.py` under the guard of `megarl/signals.py`, so that Ray's processes are no children of
the driver: neither the driver's signals nor its end, whatever ends it, leaves one of them behind.
"""

import atexit
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import psutil
import ray
from ray._private.node import Node
from ray._private.parameter import RayParams

from megarl.config.errors import ConfigError
from megarl.interfaces import DeadlineError
from megarl.signals import find_exit_code, flush_output

T = TypeVar("T")

POLL_S = 1.0


class RayLostError(RuntimeError):
    """Ray itself has died or does not answer. Nothing can be called in it any more, so the run ends."""


@dataclass
class _Ray:
    """What this process knows of the Ray that it uses, of which there is one at a time."""

    deadline_s: float = 120.0
    """cluster.ray_deadline_s"""
    raylet: psutil.Process | None = None
    """Of this machine, whose end ends all processes of this node; None: not known"""
    runs_at: float = math.inf
    """When the raylet was last seen not to be stopped"""
    unanswered: list[Future[Any]] = field(default_factory=list)
    lost: str | None = None
    """Why it is lost; None: it is not"""


_ray = _Ray()
_was_lost = False
"""Whether Ray was lost, this one or an earlier one"""


def begin(deadline_s: float) -> None:
    """Note that another Ray is used from here on."""
    global _ray
    _ray = _Ray(deadline_s)


def watch_raylet() -> None:
    """Note the raylet of the Ray that this process has joined; calls that wait look after it."""
    node = ray._private.worker._global_node
    assert node is not None
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.name() == "raylet" and str(node.session_name) in " ".join(process.cmdline()):
                _ray.raylet = process


def is_lost() -> bool:
    return _ray.lost is not None


def ask(what: str, call: Callable[[], T], wait_s: float = 0.0, deadline_s: float | None = None) -> T:
    """The result of `call`, which may itself wait for `wait_s`; beyond that Ray has `deadline_s`.

    what: completes "Ray did not answer within 120 s: ...". deadline_s: None stands for cluster.ray_deadline_s.
    Raises RayLostError where Ray is lost, else what `call` does.
    """
    if _ray.lost is not None:
        raise RayLostError(_ray.lost)
    answer = Future[T]()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    _check_raylet(what)
    # Noted before it starts: a signal may end `start` by raising when the thread runs already.
    _ray.unanswered = [each for each in _ray.unanswered if not each.done()] + [answer]
    # Not a pool's thread: one that Ray does not answer is left behind.
    threading.Thread(target=run, daemon=True, name=f"ray: {what}").start()
    limit_s = _ray.deadline_s if deadline_s is None else deadline_s
    end = time.monotonic() + wait_s + limit_s
    while not wait_futures([answer], max(0.0, min(POLL_S, end - time.monotonic()))).done:
        _check_raylet(what)
        if time.monotonic() >= end:
            key = " (cluster.ray_deadline_s)" if deadline_s is None else ""
            lose(f"Ray did not answer within {limit_s:g} s{key}: {what}")
    return answer.result()


def _check_raylet(what: str) -> None:
    """Raise RayLostError where this machine's raylet is gone, or stopped for cluster.ray_deadline_s."""
    if _ray.raylet is None:
        return
    state = psutil.STATUS_DEAD
    with suppress(psutil.NoSuchProcess):
        state = _ray.raylet.status()
    if state in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE):
        lose(f"Ray's process raylet has died: {what}")
    now = time.monotonic()
    _ray.runs_at = now if state != psutil.STATUS_STOPPED else _ray.runs_at
    if now > _ray.runs_at + _ray.deadline_s:
        lose(f"Ray's process raylet is stopped for {_ray.deadline_s:g} s (cluster.ray_deadline_s): {what}")


def lose(reason: str) -> NoReturn:
    """Raise RayLostError with this reason; so does each later call of `ask`."""
    _ray.lost = reason
    give_up()
    raise RayLostError(reason)


def settle(timeout_s: float) -> bool:
    """Wait for the calls that have no answer, such as one that a signal has cut short; returns whether all have ended.

    Ray ends the process at once where one of them goes on after `ray.shutdown`.
    """
    return not wait_futures(_ray.unanswered, timeout_s).not_done


def give_up() -> None:
    """Never leave Ray: at this process's end its native code is skipped, which crashes or waits where Ray is lost."""
    global _was_lost
    _was_lost = True
    atexit.unregister(ray.shutdown)


@atexit.register  # Registered early, it runs late: after what others do at the end.
def _exit_at_once() -> None:
    if _was_lost:
        flush_output()
        os._exit(find_exit_code(1))


SLICE_S = 1.0
"""The longest wait in Ray at once: where a signal interrupts the caller, that wait goes on by itself until its end."""
CAUSE_S = 3.0
"""How long to wait for the others once one has failed: the first failure is not always the cause."""
EXPLAIN_S = 30.0
"""How long describing the processes that are late may take, beyond what Ray may"""


class WorkerError(RuntimeError):
    """A call failed in another process; the message names the process and the call."""

    def __init__(self, message: str, lost: bool = False):
        """lost: a process has died, so that the call may succeed in a new one."""
        super().__init__(message)
        self.lost = lost


@dataclass(frozen=True)
class PendingCall(Generic[T]):
    """A running call in several processes; `merge` combines their results. A `Pending`."""

    refs: tuple[ray.ObjectRef[Any], ...]
    names: tuple[str, ...]
    """The process behind each ref, for messages"""
    what: str
    deadline_s: float
    """Counted from the creation of this object"""
    merge: Callable[[list[Any]], T]
    explain: Callable[[Sequence[int]], str] | None = None
    """Describes what the processes with these numbers are doing, which have not answered"""
    started: float = field(default_factory=time.monotonic)

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for all; returns whether all have succeeded.

        Raises WorkerError, or its ConfigError, as soon as one has failed, DeadlineError naming those that are late and
        their stacks, RayLostError where Ray itself does not answer.
        """
        left = self.started + self.deadline_s - time.monotonic()
        end = time.monotonic() + min(timeout_s, max(0.0, left))
        waiting = list(self.refs)
        while waiting:
            slice_s = min(SLICE_S, max(0.0, end - time.monotonic()))
            has_failed, waiting = ask(self.what, partial(self._look, waiting, slice_s), slice_s)
            if has_failed:
                ask(self.what, self._raise_failed, CAUSE_S + EXPLAIN_S)
            if waiting and time.monotonic() >= end:
                if left <= timeout_s:
                    ask(self.what, partial(self._raise_late, waiting), EXPLAIN_S)
                return False
        return True

    def result(self) -> T:
        """Wait for the merged result. Raises as `wait`."""
        self.wait(self.deadline_s)
        return self.merge(ask(self.what, lambda: [ray.get(ref) for ref in self.refs]))

    def _look(self, waiting: list[ray.ObjectRef[Any]], timeout_s: float) -> tuple[bool, list[ray.ObjectRef[Any]]]:
        """Wait for one at least; returns whether one has failed, and those that are still waited for."""
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=timeout_s)
        if waiting:
            # All others that have ended: one look a call would find an ended call of many processes late.
            more, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0)
            ready = [*ready, *more]
        return any(_find_error(ref) for ref in ready), waiting

    def _raise_failed(self) -> NoReturn:
        """Raise WorkerError: deaths first, then one failure in full. Where a process died, others' collectives fail.

        A ConfigError of a process, which the user can mend, is raised as it is.
        """
        ended, waiting = ray.wait(list(self.refs), num_returns=len(self.refs), timeout=CAUSE_S)
        errors = {self._name(ref): error for ref in ended if (error := _find_error(ref))}
        deaths = {name: error for name, error in errors.items() if isinstance(error, ray.exceptions.RayActorError)}
        failures = {name: error for name, error in errors.items() if name not in deaths}
        for name, error in failures.items():
            if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, ConfigError):
                raise ConfigError([f"{name}: {problem}" for problem in error.cause.problems]) from error
        lines = [f"{name} died: {error}" for name, error in deaths.items()]
        if failures:
            (name, error), *others = failures.items()
            lines.append(f"{name} failed:\n{error}")
            if others:
                lines.append(f"also failed: {', '.join(name for name, _ in others)}")
        if waiting and self.explain:
            lines.append(self.explain([self.refs.index(ref) for ref in waiting]))
        cause = next(iter([*deaths.values(), *failures.values()]))
        raise WorkerError(f"{self.what}: " + "\n".join(lines), lost=bool(deaths)) from cause

    def _raise_late(self, waiting: Sequence[ray.ObjectRef[Any]]) -> NoReturn:
        text = f"{self.what}: no answer from {', '.join(map(self._name, waiting))} within {self.deadline_s:g} s"
        if self.explain:
            text += ":\n" + self.explain([self.refs.index(ref) for ref in waiting])
        raise DeadlineError(text)

    def _name(self, ref: ray.ObjectRef[Any]) -> str:
        return self.names[self.refs.index(ref)]


def _find_error(ref: ray.ObjectRef[Any]) -> Exception | None:
    """The error of a call that has ended, RayActorError where its process died; None where it succeeded."""
    try:
        ray.get(ref)
    except ray.exceptions.RayError as error:
        return error
    return None


def collect(refs: Sequence[ray.ObjectRef[Any]], timeout_s: float) -> list[Any]:
    """Of each, in order, its result or its RayError: GetTimeoutError where it has none within `timeout_s`."""
    if refs:
        ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)

    def get(ref: ray.ObjectRef[Any]) -> Any:
        try:
            return ray.get(ref, timeout=0)
        except ray.exceptions.RayError as error:
            return error

    return [get(ref) for ref in refs]


def wait_for(refs: Sequence[ray.ObjectRef[Any]], names: Sequence[str], what: str, deadline_s: float) -> list[Any]:
    """The results of `refs` in order. Raises as `PendingCall.wait`."""
    return PendingCall(tuple(refs), tuple(names), what, deadline_s, list).result()


ADDRESS_FILE = "address"
"""In TEMP_DIR: HOST:PORT of Ray, once it can be joined"""
HOST = "127.0.0.1"
"""With this address of a node Ray's processes listen on no other interface"""


def main() -> None:
    """Start Ray and wait to be killed; Ray's processes are then killed by the kernel."""
    temp_dir, num_cpus, object_store_bytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    # Not ray.init: it takes the machine's public address instead of the loopback's, and starts a monitor, whose
    # metrics answer on all interfaces. Neither the monitor (of nodes to add) nor that of logs is used.
    parameters = RayParams(
        node_ip_address=HOST,
        node_name=HOST,
        num_cpus=num_cpus,
        object_store_memory=object_store_bytes,
        include_dashboard=False,
        include_log_monitor=False,  # type: ignore[arg-type]  # Ray's types are wrong here
        no_monitor=True,
        temp_dir=str(temp_dir),
    )
    node = Node(parameters, head=True, shutdown_at_exit=False, spawn_reaper=True)
    building = temp_dir / f".{ADDRESS_FILE}"
    building.write_text(node.gcs_address)
    os.replace(building, temp_dir / ADDRESS_FILE)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
