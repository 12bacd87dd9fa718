"""Signals that ask a process to end, raised as one exception, so that every `finally` block runs."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from megarl.run.terminal import get_error_descriptor

STOPPING_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)
"""SIGUSR1 and SIGUSR2 are what batch systems send before the time limit (Slurm's --signal), SIGXCPU what the kernel
sends at the limit of CPU time (ulimit -t)."""

AGAIN_S = 0.05
"""After so long a signal that was lost is raised again"""

_deferred: "list[Stopped] | None" = None
"""Signals that arrived while they are deferred; None: they are not deferred"""


_number: int | None = None
"""The signal that has stopped this process; None: none has"""


class Stopped(BaseException):
    """The process was asked to end. Not an Exception, so that no error handler swallows it."""

    def __init__(self, number: int):
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")

    @property
    def exit_code(self) -> int:
        """The exit code that a shell reports for a process that this signal ended."""
        return 128 + self.number


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Within the block the first such signal raises Stopped; later ones are ignored during the clean-up.

    A SIGHUP that is ignored already (nohup) stays ignored. The others are taken also where the shell ignores them, as
    for jobs in the background of a script.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return

    def stop(number: int, _frame: FrameType | None) -> None:
        global _number
        _number = number
        # While Ray starts, a handler of its own runs before this one; it has the process aborted 3 s later.
        signal.alarm(0)
        for each in STOPPING_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        if _deferred is not None:
            _deferred.append(Stopped(number))
            # Not print: the signal may have interrupted one.
            with contextlib.suppress(OSError):
                os.write(
                    get_error_descriptor(),
                    f"\n{signal.Signals(number).name}: finishing the current update first\n".encode(),
                )
            return
        raise Stopped(number)

    report, again = sys.unraisablehook, list[threading.Timer]()

    def raise_again(lost: "sys.UnraisableHookArgs") -> None:
        # Raised within a __del__ or a callback, from which nothing gets out: again, once that is over.
        if not isinstance(lost.exc_value, Stopped):
            report(lost)
            return
        signal.signal(lost.exc_value.number, stop)
        again.append(threading.Timer(AGAIN_S, os.kill, (os.getpid(), lost.exc_value.number)))
        again[-1].start()

    has_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    taken = [number for number in STOPPING_SIGNALS if number is not signal.SIGHUP or not has_nohup]
    previous = {number: signal.signal(number, stop) for number in taken}
    sys.unraisablehook = raise_again
    try:
        with surfacing_stops():
            yield
    finally:
        sys.unraisablehook = report
        for timer in again:
            timer.cancel()  # What it would raise has another handler now.
        for number, handler in previous.items():
            signal.signal(number, handler)


def find_exit_code(otherwise: int) -> int:
    """128 + the number of the signal that has stopped this process, or `otherwise`."""
    return otherwise if _number is None else 128 + _number


@contextmanager
def surfacing_stops() -> Iterator[None]:
    """Raises Stopped where interrupted C code (a wait in Ray) turned it into a SystemError."""
    try:
        yield
    except SystemError as error:
        if isinstance(error.__cause__, Stopped):
            raise error.__cause__ from None
        raise


@contextmanager
def deferring_stops() -> Iterator[None]:
    """A signal that arrives within the block raises Stopped at its end, instead of whatever the block raised.

    Within another such block this one does nothing.
    """
    global _deferred
    if _deferred is not None:
        yield
        return
    came: list[Stopped] = []
    _deferred = came
    try:
        yield
    finally:
        _deferred = None
        if came:
            raise came[0]
