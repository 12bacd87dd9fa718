"""The process of a command: the signals that ask it to end, and its terminal while libraries print to a file."""

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

DRIVER_LOG = "driver.log"
FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"
_captured: tuple[TextIO, TextIO] | None = None
"""Standard output and error as they were before; None: nothing is captured"""


def get_terminal() -> TextIO:
    """Standard output, as the command was started with it."""
    return _captured[0] if _captured is not None else sys.stdout


def get_error_descriptor() -> int:
    """The file descriptor of standard error, as the command was started with it."""
    return _captured[1].fileno() if _captured is not None else 2


@contextmanager
def capturing_output(log: Path) -> Iterator[None]:
    """Within the block, what anything but `get_terminal` writes to standard output or error is appended to `log`.

    That is also what C++ code writes, and what child processes inherit. Python's loggers write there from INFO on. A
    crash (SIGSEGV, SIGABRT) still shows the Python stack on the terminal.
    """
    global _captured
    log.parent.mkdir(parents=True, exist_ok=True)
    root, handler = logging.getLogger(), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT))
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for each request
    level = root.level
    flush_output()
    with _duplicate(sys.stdout, 1) as terminal, _duplicate(sys.stderr, 2) as errors:
        with log.open("ab") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        _captured = terminal, errors
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        faulthandler.enable(file=errors)
        try:
            yield
        finally:
            faulthandler.disable()
            root.removeHandler(handler)
            root.setLevel(level)
            flush_output()
            os.dup2(terminal.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            _captured = None


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _duplicate(stream: TextIO, number: int) -> TextIO:
    """A stream of its own on the descriptor, encoded as `stream` is."""
    encoding, errors = stream.encoding or "utf-8", stream.errors or "backslashreplace"
    return os.fdopen(os.dup(number), "w", buffering=1, encoding=encoding, errors=errors)


@contextmanager
def show_warnings(message: Callable[[str], None]) -> Iterator[None]:
    """Passes Python warnings of megarl's and the user's code within the block to `message` as a line, each once.

    Those of libraries go where their other output goes.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("once", RuntimeWarning)
        show = warnings.showwarning

        def show_own(text: Warning | str, category: type[Warning], filename: str, *rest: Any) -> None:
            if is_library(filename):
                show(text, category, filename, *rest)
            else:
                message(f"warning: {text}")

        warnings.showwarning = show_own  # type: ignore[assignment]  # the rest is passed on as it is
        yield


def is_library(filename: str) -> bool:
    """Whether the source file is of a package that is installed, other than megarl, or of Python itself."""
    own, installed = str(Path(__file__).resolve().parent), ("site-packages", "dist-packages")
    elsewhere = filename.startswith(("<frozen", sysconfig.get_path("stdlib")))
    return not filename.startswith(own) and (elsewhere or any(folder in filename for folder in installed))


STOPPING_SIGNALS = tuple(getattr(signal, f"SIG{name}") for name in ("INT", "TERM", "HUP", "USR1", "USR2", "XCPU"))
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
        self.exit_code = 128 + number
        """As a shell reports it for a process that this signal ended"""
        super().__init__(f"stopped by {signal.Signals(number).name}")


def _stop(number: int, _frame: FrameType | None) -> None:
    global _number
    _number = number
    # While Ray starts, a handler of its own runs before this one; it has the process aborted 3 s later.
    signal.alarm(0)
    for each in STOPPING_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    if _deferred is None:
        raise Stopped(number)
    _deferred.append(Stopped(number))
    # Not print: the signal may have interrupted one.
    text = f"\n{signal.Signals(number).name}: finishing the current update first\n"
    with contextlib.suppress(OSError):
        os.write(get_error_descriptor(), text.encode())


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Within the block the first such signal raises Stopped; later ones are ignored during the clean-up.

    A SIGHUP that is ignored already (nohup) stays ignored. The others are taken also where the shell ignores them, as
    for jobs in the background of a script. Outside of the main thread, which alone gets signals, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    report, again = sys.unraisablehook, list[threading.Timer]()

    def raise_again(lost: "sys.UnraisableHookArgs") -> None:
        # Raised within a __del__ or a callback, from which nothing gets out: again, once that is over.
        if not isinstance(lost.exc_value, Stopped):
            report(lost)
            return
        signal.signal(lost.exc_value.number, _stop)
        again.append(threading.Timer(AGAIN_S, os.kill, (os.getpid(), lost.exc_value.number)))
        again[-1].start()

    has_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    taken = [number for number in STOPPING_SIGNALS if number is not signal.SIGHUP or not has_nohup]
    previous = {number: signal.signal(number, _stop) for number in taken}
    sys.unraisablehook = raise_again
    try:
        yield
    except SystemError as error:
        # Interrupted C code (a wait in Ray) has turned Stopped into this.
        if isinstance(error.__cause__, Stopped):
            raise error.__cause__ from None
        raise
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
