"""Signals that ask a process to end, as one exception, so that every `finally` runs and nothing is left behind."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""SIGUSR1: what Slurm can be asked to send before the time limit (--signal)."""

_deferred: "list[Stopped] | None" = None
"""Signals that came while none may interrupt; None: they may"""


class Stopped(BaseException):
    """The process was asked to end. Not an Exception: nothing that handles errors may swallow it."""

    def __init__(self, number: int):
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")

    @property
    def exit_code(self) -> int:
        """What a shell reports for a process that this signal ended."""
        return 128 + self.number


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Within the block the first such signal raises Stopped; later ones are ignored while the clean-up runs."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return

    def stop(number: int, _frame: FrameType | None) -> None:
        for each in STOPPING_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        if _deferred is not None:
            _deferred.append(Stopped(number))
            # Not print: the signal may have come in the middle of one.
            with contextlib.suppress(OSError):
                os.write(2, f"\n{signal.Signals(number).name}: the update under way ends first\n".encode())
            return
        raise Stopped(number)

    previous = {number: signal.signal(number, stop) for number in STOPPING_SIGNALS}
    try:
        with surfacing_stops():
            yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def surfacing_stops() -> Iterator[None]:
    """Stopped, where C code that a signal has interrupted (Ray's, in a wait) made a SystemError of it."""
    try:
        yield
    except SystemError as error:
        if isinstance(error.__cause__, Stopped):
            raise error.__cause__ from None
        raise


@contextmanager
def deferring_stops() -> Iterator[None]:
    """A signal that comes within the block raises Stopped at its end, in place of whatever the block raised.

    Within another such block it does nothing of its own.
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
