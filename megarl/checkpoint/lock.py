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
    """Hold the directory's lock; it goes with this process, in whatever way that ends.

    patience_s: how long one that another holds is waited for. `say` is told once that it is.
    Raises CheckpointError naming the process that holds it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / NAME).open("a+") as file:
        try:
            is_mine = take_lock(file)
            if not is_mine and patience_s > 0:
                say(
                    f"waiting up to {patience_s:g} s for the lock of {directory}, which {read_holder(file)} holds:"
                    " a network file system keeps that of a node that was lost for a while"
                )
            end = time.monotonic() + patience_s
            while not is_mine and time.monotonic() < end:
                time.sleep(min(POLL_S, patience_s))
                is_mine = take_lock(file)
        except OSError as error:
            raise CheckpointError(
                f"{directory}: its file system has no locks ({error}), by which two processes would notice each other;"
                " Lustre has them where it is mounted with -o flock"
            ) from error
        if not is_mine:
            waited = f", also after {patience_s:g} s" if patience_s else ""
            raise CheckpointError(
                f"{directory}: {read_holder(file)} is at work there{waited}; only one process at a time may be"
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def take_lock(file: IO[str]) -> bool:
    """Whether this process has it now. Raises OSError where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_holder(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip() or "another process"
