"""Waiting for Ray: every wait has a deadline, fails as soon as one call fails, and names what it waited for."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

import ray

from megarl.cluster.ray_calls import ask, check
from megarl.config.errors import ConfigError
from megarl.interfaces import DeadlineError

T = TypeVar("T")

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
    """A running call in several processes; `merge` combines their results. Implements `interfaces.Pending`."""

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
        """Wait for one; returns whether one has failed, and those that are still waited for."""
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=timeout_s)
        check(self.what)
        return any(self._find_error(ref) for ref in ready), waiting

    def _find_error(self, ref: ray.ObjectRef[Any]) -> Exception | None:
        """The error of a call that has ended, RayActorError where its process died; None where it succeeded."""
        try:
            ray.get(ref)
        except ray.exceptions.RayError as error:
            return error
        return None

    def _raise_failed(self) -> NoReturn:
        """Raise WorkerError: deaths first, then one failure in full. Where a process died, others' collectives fail.

        A ConfigError of a process, which the user can mend, is raised as it is.
        """
        ended, waiting = ray.wait(list(self.refs), num_returns=len(self.refs), timeout=CAUSE_S)
        errors = {self._name(ref): error for ref in ended if (error := self._find_error(ref))}
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


def wait_for(refs: Sequence[ray.ObjectRef[Any]], names: Sequence[str], what: str, deadline_s: float) -> list[Any]:
    """The results of `refs` in order. Raises as `PendingCall.wait`."""
    return PendingCall(tuple(refs), tuple(names), what, deadline_s, list).result()
