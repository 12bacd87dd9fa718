"""Calls of Ray, each with a deadline: Ray's own calls are native code that waits for its processes without one.

A call runs in a thread, while the caller waits and can be interrupted by a signal.
"""

import atexit
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar, cast

import psutil
import ray

from megarl.run.signals import find_exit_code

T = TypeVar("T")
Answer = tuple[Any, BaseException | None]
"""The result of a call, or what it raised"""

POLL_S = 1.0
RAYLET = "raylet"
OWN_NAMES = ("gcs_server", RAYLET, "ray::RuntimeEnv", "ray::DashboardAg")
"""How the names of the processes begin of which Ray itself consists, as far as a run needs them"""
FORGET_S = 30.0
"""After so long without a look a stopped process counts as stopped anew"""


class RayLostError(RuntimeError):
    """Ray itself has died or does not answer. Nothing can be called in it any more, so the run ends."""


@dataclass
class _Ray:
    """What this process knows of the Ray that it uses, of which there is one at a time."""

    deadline_s: float = 120.0
    """cluster.ray_deadline_s"""
    processes: Mapping[str, psutil.Process] = field(default_factory=dict)
    """Those of this machine, by name"""
    stopped_since: dict[str, float] = field(default_factory=dict)
    looked: float = 0.0
    unanswered: list[threading.Event] = field(default_factory=list)
    """Of each call that has no answer yet, set once it has one"""
    lost: str | None = None
    """Why it is lost; None: it is not"""


_ray = _Ray()
_was_lost = False
"""Whether Ray was lost, this one or an earlier one"""


def begin(deadline_s: float) -> None:
    """Note that another Ray is used from here on."""
    global _ray
    _ray = _Ray(deadline_s)


def watch(processes: Mapping[str, psutil.Process]) -> None:
    """Note the processes of Ray on this machine, of which calls that wait are to look after."""
    _ray.processes = dict(processes)


def find_processes(candidates: list[psutil.Process]) -> dict[str, psutil.Process]:
    """Ray's own processes among `candidates`, by name."""
    found = {}
    for process in candidates:
        try:
            name = process.name()
        except psutil.NoSuchProcess:
            continue
        if name.startswith(OWN_NAMES):
            found[name] = process
    return found


def is_lost() -> bool:
    return _ray.lost is not None


def ask(what: str, call: Callable[[], T], wait_s: float = 0.0, deadline_s: float | None = None) -> T:
    """The result of `call`, which may itself wait for `wait_s`; beyond that Ray has `deadline_s`.

    what: completes "Ray did not answer within 120 s: ...". deadline_s: None stands for cluster.ray_deadline_s.
    Raises RayLostError where Ray is lost, else what `call` does.
    """
    if _ray.lost is not None:
        raise RayLostError(_ray.lost)
    check(what)
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    answered = threading.Event()

    def run() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))
        finally:
            answered.set()

    # Noted before it starts: a signal may end `start` by raising when the thread runs already.
    _ray.unanswered = [each for each in _ray.unanswered if not each.is_set()] + [answered]
    # Not a pool's thread: one that Ray does not answer is left behind.
    threading.Thread(target=run, daemon=True, name=f"ray: {what}").start()
    limit_s = _ray.deadline_s if deadline_s is None else deadline_s
    end = time.monotonic() + wait_s + limit_s
    while (answer := _take(answers, min(POLL_S, end - time.monotonic()))) is None:
        check(what)
        if time.monotonic() >= end:
            key = " (cluster.ray_deadline_s)" if deadline_s is None else ""
            lose(f"Ray did not answer within {limit_s:g} s{key}: {what}")
    result, error = answer
    if error is not None:
        raise error
    return cast(T, result)


def _take(answers: "queue.SimpleQueue[Answer]", timeout_s: float) -> Answer | None:
    try:
        return answers.get(timeout=max(0.0, timeout_s))
    except queue.Empty:
        return None


def settle(timeout_s: float) -> bool:
    """Wait for the calls that have no answer, such as one that a signal has cut short; returns whether all have ended.

    Ray ends the process at once where one of them goes on after `ray.shutdown`.
    """
    end = time.monotonic() + timeout_s
    return all(each.wait(max(0.0, end - time.monotonic())) for each in _ray.unanswered)


def give_up() -> None:
    """Never leave Ray: at this process's end its native code is skipped."""
    global _was_lost
    _was_lost = True
    # It would wait for Ray, or end this process, with another exit code.
    atexit.unregister(ray.shutdown)


def _exit_at_once() -> None:
    """At this process's end: skip that of Ray's native code, which crashes where Ray is lost or does not answer."""
    if _was_lost:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(find_exit_code(1))


# Registered early, it runs late: after what others do at the end.
atexit.register(_exit_at_once)


def check(what: str) -> None:
    """Raise RayLostError where a process of Ray on this machine is gone, or stopped for cluster.ray_deadline_s.

    what: what is waited for.
    """
    now = time.monotonic()
    if now - _ray.looked > FORGET_S:
        _ray.stopped_since.clear()
    _ray.looked = now
    for name, process in _ray.processes.items():
        state = find_state(process)
        if state == psutil.STATUS_STOPPED:
            since = _ray.stopped_since.setdefault(name, now)
            if now - since > _ray.deadline_s:
                lose(f"Ray's process {name} is stopped for {_ray.deadline_s:g} s (cluster.ray_deadline_s): {what}")
        else:
            _ray.stopped_since.pop(name, None)
        # Without the others a run goes on, until it needs them. The raylet's end ends all processes of this node.
        if name == RAYLET and state is None:
            lose(f"Ray's process {name} has died: {what}")


def lose(reason: str) -> NoReturn:
    """Raise RayLostError with this reason and the state of Ray's processes; so does each later call of `ask`."""
    states = [f"{name} {process.pid} {find_state(process) or 'is gone'}" for name, process in _ray.processes.items()]
    _ray.lost = reason + (f"; its processes here: {', '.join(states)}" if states else "")
    give_up()
    raise RayLostError(_ray.lost)


def find_state(process: psutil.Process) -> str | None:
    """A process's state as psutil names it; None: it is gone."""
    try:
        state = str(process.status())
    except psutil.NoSuchProcess:
        return None
    return None if state in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else state
