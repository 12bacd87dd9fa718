"""Parallel calls to several servers, which a signal interrupts, and the reason why a server was lost."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, wait
from typing import TypeVar
from weakref import WeakSet

from megarl.interfaces import DeadlineError

T = TypeVar("T")

_left_over: WeakSet[threading.Thread] = WeakSet()
"""Threads of abandoned calls; they may still be cleaning up on a server"""

FIND_DEADLINE_S = 3.0
"""How long to wait for an exit status: a connection breaks before the process behind it has been reaped."""


class StopFlag:
    """Set once the calls have been abandoned."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def check(self) -> None:
        """Raise CancelledError where the flag is set."""
        if self._event.is_set():
            raise CancelledError

    def sleep(self, seconds: float) -> None:
        """Sleep; raises as `check`, at once when the flag is set meanwhile."""
        self._event.wait(seconds)
        self.check()


def run_in_parallel(jobs: Sequence[Callable[[StopFlag], T]], abort: Callable[[], None]) -> list[T]:
    """Run each job in a thread of its own; returns their results in order.

    The first failure, or an exception in the waiting thread (Stopped), is raised at once: the flag is set and
    `abort` is called, which must break the calls in flight. The threads are daemons, so that one that still hangs
    (while it connects, say) does not keep the process from ending, as the threads of an executor would.
    """
    stop = StopFlag()
    futures: list[Future[T]] = [Future() for _ in jobs]
    threads = [
        threading.Thread(target=_run, args=(job, stop, future), name="megarl-call", daemon=True)
        for job, future in zip(jobs, futures, strict=True)
    ]
    try:
        for thread in threads:
            thread.start()
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            if future in done:
                future.result()
        return [future.result() for future in futures]
    except BaseException:
        stop.set()
        _left_over.update(threads)
        abort()
        raise


def wait_left_over(deadline_s: float) -> None:
    """Wait for the threads of abandoned calls; until they end, they may still call a server.

    Raises DeadlineError where one is still running after `deadline_s`.
    """
    end = time.monotonic() + deadline_s
    for thread in list(_left_over):
        if thread.ident is not None:
            thread.join(max(0.0, end - time.monotonic()))
    num_left = sum(thread.is_alive() for thread in _left_over)
    if num_left:
        raise DeadlineError(f"{num_left} abandoned calls to SGLang servers have not ended within {deadline_s:g} s")


def _run(job: Callable[[StopFlag], T], stop: StopFlag, future: Future[T]) -> None:
    try:
        stop.check()
        future.set_result(job(stop))
    except BaseException as error:
        future.set_exception(error)


def find_cause(check_processes: Callable[[], None] | None, deadline_s: float = FIND_DEADLINE_S) -> RuntimeError | None:
    """The error that `check_processes` raises for a server that is down, polled until the deadline; None: all run."""
    if check_processes is None:
        return None
    end = time.monotonic() + deadline_s
    while True:
        try:
            check_processes()
        except RuntimeError as error:
            return error
        if time.monotonic() > end:
            return None
        time.sleep(0.2)
