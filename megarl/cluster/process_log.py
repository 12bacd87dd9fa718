"""The log file of a process that Ray starts."""

import os
import sys
from pathlib import Path


def redirect_output(log_path: Path) -> None:
    """Redirect this process's stdout and stderr, native code included, to a file."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab", buffering=0) as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
