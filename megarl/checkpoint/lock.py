"""One process at a time may write to a run directory."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from megarl.checkpoint.manifest import CheckpointError

NAME = ".lock"


@contextlib.contextmanager
def locking(directory: Path) -> Iterator[None]:
    """Hold the directory's lock; it goes with this process, in whatever way that ends.

    Raises CheckpointError naming the process that holds it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / NAME).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise CheckpointError(
                f"{directory}: {holder} is at work there; only one process at a time may be"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"{directory}: its file system has no locks ({error}), by which two processes would notice each other;"
                " Lustre has them where it is mounted with -o flock"
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
