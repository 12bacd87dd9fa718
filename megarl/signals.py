"""SIGINT, SIGTERM and SIGHUP as one exception, so that every `finally` runs and nothing is left behind."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
        raise Stopped(number)

    previous = {number: signal.signal(number, stop) for number in STOPPING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
