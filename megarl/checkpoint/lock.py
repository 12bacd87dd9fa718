"""One process at a time may write to a run directory."""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from megarl.checkpoint.manifest import CheckpointError

NAME = ".lock"
POLL_S = 1.0


@contextlib.contextmanager
def locking(
    directory: Path, patience_s: float = 0.0, say: Callable[[str], None] = lambda _text: None
) -> Iterator[None]:
    """Hold the directory's lock, which is freed when this process ends for whatever reason.

    patience_s: how long to wait for another process that holds it. say: called once with a message when waiting.
    Raises CheckpointError naming the process that holds it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / NAME).open("a+") as file:
        try:
            is_mine = take_lock(file)
            if not is_mine and patience_s > 0:
                say(
                    f"waiting up to {patience_s:g} s for the lock of {directory}, which {read_holder(file)} holds:"
                    " a network file system keeps the lock of a lost node for a while"
                )
            end = time.monotonic() + patience_s
            while not is_mine and time.monotonic() < end:
                time.sleep(min(POLL_S, patience_s))
                is_mine = take_lock(file)
        except OSError as error:
            raise CheckpointError(
                f"{directory}: its file system has no locks ({error}), which keep two"
                " processes from writing to one folder; Lustre has them where it is mounted with -o flock"
            ) from error
        if not is_mine:
            waited = f", even after {patience_s:g} s" if patience_s else ""
            raise CheckpointError(
                f"{directory}: {read_holder(file)} uses it{waited}; only one process at a time may be"
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def take_lock(file: IO[str]) -> bool:
    """Try to take the lock; returns whether this process holds it. Raises OSError where there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_holder(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip() or "another process"
