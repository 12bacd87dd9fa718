"""Runs one server process and makes sure that none of its processes outlives its owner.

    python -S -I guard.py SCRATCH_DIR COMMAND...

The owner holds the other end of this process's standard input. When that closes (the owner stopped the server or died),
on SIGTERM, or when the server exits, the guard kills every descendant process of the server, removes what they left in
/dev/shm and in SCRATCH_DIR, and exits with the server's status. Kills, because SGLang has nothing to save, takes up to
11 s to end by itself, and takes a SIGTERM that reaches all of its processes for a crash.

Standard library only, so that it starts at once, without this folder on the path (-I), whose types.py is not Python's.
Linux only.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import partial

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
