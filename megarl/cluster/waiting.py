"""Waiting for Ray: every wait has a deadline, fails as soon as one awaited fails, and says what it waited for."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import ray

from megarl.seams import DeadlineError

T = TypeVar("T")


class WorkerError(RuntimeError):
    """A call failed in another process; the message names the process and the call."""


@dataclass(frozen=True)
class PendingCall(Generic[T]):
    """A call under way in several processes; `merge` makes one result of theirs. Implements `megarl.seams.Pending`."""

    refs: tuple[ray.ObjectRef, ...]
    names: tuple[str, ...]
    """Who computes each, for messages."""
    what: str
    deadline_s: float
    """Counted from the making of this object."""
    merge: Callable[[list[Any]], T]
    started: float = field(default_factory=time.monotonic)

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for all; whether they have ended well.

        Raises WorkerError as soon as one has failed, DeadlineError naming those that are late.
        """
        left = self.started + self.deadline_s - time.monotonic()
        end = time.monotonic() + min(timeout_s, max(0.0, left))
        waiting = list(self.refs)
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, end - time.monotonic()))
            for ref in ready:
                self._get(ref)
            if not ready:
                if left <= timeout_s:
                    self._raise_late(waiting)
                return False
        return True

    def result(self) -> T:
        """Raises as `wait`."""
        self.wait(self.deadline_s)
        return self.merge([self._get(ref) for ref in self.refs])

    def _get(self, ref: ray.ObjectRef) -> Any:
        name = self.names[self.refs.index(ref)]
        try:
            return ray.get(ref)
        except ray.exceptions.RayActorError as error:
            raise WorkerError(f"{self.what}: {name} died: {error}") from error
        except ray.exceptions.RayTaskError as error:
            raise WorkerError(f"{self.what}: {name} failed:\n{error}") from error

    def _raise_late(self, waiting: Sequence[ray.ObjectRef]) -> None:
        late = ", ".join(self.names[self.refs.index(ref)] for ref in waiting)
        raise DeadlineError(f"{self.what}: no answer from {late} within {self.deadline_s:g} s")


def wait_for(refs: Sequence[ray.ObjectRef], names: Sequence[str], what: str, deadline_s: float) -> list[Any]:
    """The results of `refs` in order. Raises as `PendingCall.wait`."""
    return PendingCall(tuple(refs), tuple(names), what, deadline_s, list).result()
