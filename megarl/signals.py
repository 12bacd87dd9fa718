"""A process and its system: the signals that ask it to end, its terminal while libraries print to a file, free ports,
and a guard, which makes sure that none of a server's processes outlives its owner.

    python -S -I signals.py SCRATCH_DIR COMMAND...

The owner holds the other end of the guard's standard input. When that closes (the owner stopped the server or died), on
SIGTERM, or when the server exits, the guard kills every descendant process of the server, removes what they left in
/dev/shm and in SCRATCH_DIR, and exits with the server's status. Kills, because SGLang has nothing to save, takes up to
11 s to end by itself, and takes a SIGTERM that reaches all of its processes for a crash.

Standard library only, so that a guard starts at once, without this folder on the path (-I), whose types.py is not
Python's. Linux only.
"""

import contextlib
import ctypes
import errno
import faulthandler
import logging
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

DRIVER_LOG = "driver.log"
FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"
GUARD = Path(__file__)
"""What the guard of a server, or of a local Ray, is started with"""
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


def is_stopping() -> bool:
    """Whether a signal has asked for the end within `stopping_on_signals`, also where its Stopped was handled."""
    return _number is not None and signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


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


PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_S = 1.0
"""How long Python's resource trackers may take to remove what their processes left."""
SCAN_EVERY_S = 2.0


def list_descendants(root: int) -> list[int]:
    """The process ids of all descendants of `root`, without `root` itself."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat") as stat:
                parent = int(stat.read().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def find_shared_memory(pids: Iterable[int]) -> set[int]:
    """Inodes of the files under /dev/shm that these processes have open or mapped.

    Inodes, because a semaphore's mapping has the name of a temporary file that glibc has already removed.
    """
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{fd}").startswith("/dev/shm/"):
                        found.add(os.stat(f"/proc/{pid}/fd/{fd}").st_ino)
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
            found |= {int(line.split()[4]) for line in maps if "/dev/shm/" in line}
    return found


def is_resource_tracker(pid: int) -> bool:
    """Whether it is Python's resource tracker, which ends by itself after removing its processes' semaphores."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as command:
        return b"multiprocessing.resource_tracker" in command.read()
    return False


def reap() -> bool:
    """Reap every child that has exited; returns True while any is left."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def end_all(grace_s: float) -> None:
    """Kill every descendant until none is left, parents first; Python's resource trackers come last."""
    deadline = time.monotonic() + grace_s
    while reap():
        alive = list_descendants(os.getpid())
        if time.monotonic() < deadline:
            alive = [pid for pid in alive if not is_resource_tracker(pid)]
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_PORT = 20000
"""Ray's own ports are below this one."""


def pick_free_port(host: str) -> int:
    """A TCP port that nothing listens on now, outside the kernel's ephemeral range where there is one.

    A server binds it tens of seconds later, and again when it is restarted; meanwhile every connection and every
    listener of torch and Ray takes an ephemeral port. Raises OSError where there is none.
    """
    first, last = (int(word) for word in LOCAL_PORTS.read_text().split()) if LOCAL_PORTS.is_file() else (0, 0)
    kept = [port for port in range(FIRST_PORT, 65536) if not first <= port <= last]
    for port in [*random.SystemRandom().sample(kept, min(len(kept), 100)), 0]:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind((host, port))
            return int(listener.getsockname()[1])
    raise OSError(errno.EADDRNOTAVAIL, f"no free port on {host}")


def is_loopback(host: str) -> bool:
    return ip_address(socket.gethostbyname(host)).is_loopback


def main() -> None:
    scratch, command = sys.argv[1], sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Should the guard itself be killed, the kernel kills the server's first process, which SGLang's others watch.
    die_too = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_too, start_new_session=True)
    shared: set[int] = set()
    while server.poll() is None:
        ready, _, _ = select.select([sys.stdin, wake_read], [], [], SCAN_EVERY_S)
        shared |= find_shared_memory(list_descendants(os.getpid()))
        if wake_read in ready and signal.SIGTERM in os.read(wake_read, 64):
            break
        if sys.stdin in ready and not os.read(0, 64):
            break
    status = server.poll()
    end_all(GRACE_S)
    for entry in os.scandir("/dev/shm"):
        if entry.inode() in shared:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.path)
    shutil.rmtree(scratch, ignore_errors=True)
    sys.exit(0 if status is None else status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
