"""Turns on GPUs that roles share with each other and with the servers."""

from collections.abc import Callable
from typing import Any, TypeVar

from megarl.interfaces import Pending, wait_all

P = TypeVar("P", bound=Pending[Any])


class Turns:
    """Lets the roles of a run compute at the same time, or one after the other where they share GPUs."""

    def __init__(self, one_at_a_time: bool = False) -> None:
        self.free_servers: Callable[[], None] = lambda: None
        """Called before each call of a role: has the servers give back memory of GPUs that they share with roles"""
        self._one_at_a_time = one_at_a_time
        self._running: list[tuple[str, Pending[Any]]] = []

    def start(self, role: str, start: Callable[[], P]) -> P:
        """The call that `start` starts; one at a time, once all calls of other roles have ended.

        Raises what one of those raises in the meantime, and what `free_servers` raises; the call is then not started.
        """
        self.free_servers()
        if not self._one_at_a_time:
            return start()
        for entry in list(self._running):
            state = _look(entry[1])
            if state is None and entry[0] == role:
                continue
            if state is None:
                # A signal leaves the call running.
                wait_all([entry[1]])
            # Its results stay in the object store as long as it is held here.
            self._running.remove(entry)
        pending = start()
        self._running.append((role, pending))
        return pending


def _look(pending: Pending[Any]) -> bool | None:
    """Whether the call succeeded; None: it still runs. Of a failed one whoever waits for it learns why, and what saves
    the state after that goes on.
    """
    try:
        return pending.wait(0.0) or None
    except Exception:
        return False
