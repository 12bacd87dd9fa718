"""A run of a sweep as a process of its own, so that neither its memory nor its end affects the next run."""

import contextlib
import ctypes
import signal
import subprocess
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from megarl.run.process import Stopped, stopping_on_signals

LOG = "output.log"
LONGEST_TAIL = 20_000
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def run_process(command: Sequence[str], log: Path, stop_deadline_s: float) -> int:
    """Run the command to its end and append its output to `log`. Returns its exit code, -N where signal N killed it.

    A signal that asks this process to end is passed on; Stopped is raised once the command has ended, for which it is
    killed after `stop_deadline_s`. If this process dies, the command gets SIGTERM.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output, stopping_on_signals():
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_end_with_parent,
        )
        try:
            return child.wait()
        except BaseException as error:
            number = error.number if isinstance(error, Stopped) else signal.SIGTERM
            # A terminal's Ctrl-C has reached it already; it handles the first signal only.
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)
            _end(child, stop_deadline_s)
            raise


def _end(child: "subprocess.Popen[bytes]", deadline_s: float) -> int:
    try:
        return child.wait(deadline_s)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def _end_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def explain_exit(code: int, log: Path) -> str:
    """Why a command failed, in one line: its exit code or signal, and its last lines of output."""
    ended = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LONGEST_TAIL))
            lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines()]
    except OSError as error:
        return f"{ended}; {error}"
    said = [line for line in lines if line and not line.startswith("Set the environment variable HYDRA_FULL_ERROR")]
    errors = list(takewhile(lambda line: line.startswith("error: "), reversed(said)))
    words = [line.removeprefix("error: ") for line in reversed(errors)] or said[-1:] or ["it printed nothing"]
    return f"{ended}: {'; '.join(words)}"
