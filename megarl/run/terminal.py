"""The terminal of a command, while what libraries print in its process goes to a file."""

import contextlib
import faulthandler
import logging
import os
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

DRIVER_LOG = "driver.log"
FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"
QUIET_LOGGERS = ("httpx",)
"""These log a line for each request"""

_captured: tuple[TextIO, TextIO] | None = None
"""Standard output and error as they were before; None: nothing is captured"""


def get_terminal() -> TextIO:
    """Standard output, as the command was started with it."""
    return _captured[0] if _captured is not None else sys.stdout


def get_error_descriptor() -> int:
    """The file descriptor of standard error, as the command was started with it."""
    return _captured[1].fileno() if _captured is not None else 2


@contextlib.contextmanager
def capturing_output(log: Path) -> Iterator[None]:
    """Within the block, what anything but `get_terminal` writes to standard output or error is appended to `log`.

    That is also what C++ code writes, and what child processes inherit. Python's loggers write there from INFO on. A
    crash (SIGSEGV, SIGABRT) still shows the Python stack on the terminal.
    """
    global _captured
    log.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        flush_output()
        terminal = stack.enter_context(_duplicate(sys.stdout, 1))
        errors = stack.enter_context(_duplicate(sys.stderr, 2))
        with log.open("ab") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        stack.callback(_restore, terminal.fileno(), errors.fileno())
        stack.enter_context(_logging_to(sys.stderr))
        _captured = terminal, errors
        stack.enter_context(_dumping_crashes(errors))
        yield


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _duplicate(stream: TextIO, number: int) -> TextIO:
    """A stream of its own on the descriptor, encoded as `stream` is."""
    encoding, errors = stream.encoding or "utf-8", stream.errors or "backslashreplace"
    return os.fdopen(os.dup(number), "w", buffering=1, encoding=encoding, errors=errors)


def _restore(output: int, errors: int) -> None:
    global _captured
    flush_output()
    os.dup2(output, 1)
    os.dup2(errors, 2)
    _captured = None


@contextlib.contextmanager
def _logging_to(stream: TextIO) -> Iterator[None]:
    root, handler = logging.getLogger(), logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(FORMAT))
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)


@contextlib.contextmanager
def _dumping_crashes(errors: TextIO) -> Iterator[None]:
    was_enabled = faulthandler.is_enabled()
    faulthandler.enable(file=errors)
    try:
        yield
    finally:
        faulthandler.disable()
        if was_enabled:
            faulthandler.enable()


@contextlib.contextmanager
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
    path = Path(filename).resolve()
    folders = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib", "platstdlib")}
    own = Path(__file__).resolve().parents[1]
    return not path.is_relative_to(own) and (any(map(path.is_relative_to, folders)) or filename.startswith("<frozen"))
