"""RUN_DIR/status.json: the current phase of a run, for monitoring from outside.

{"iteration": 3, "phase": "rollout", "since": 1790000000.0, "pid": 4711}

`iteration` is the current one; `phase` is null between phases; `since` is in seconds of Unix time.
"""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from megarl.json_text import parse_json

FILE_NAME = "status.json"


class StatusFile:
    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._partial = path.with_name(f".{path.name}.partial")

    def write(self, iteration: int, phase: str | None) -> None:
        """Write the file atomically.

        The file is not essential: it is not synced to disk, and an error of a full disk is left to other writers.
        """
        content = {"iteration": iteration, "phase": phase, "since": time.time(), "pid": os.getpid()}
        with contextlib.suppress(OSError):
            self._partial.write_text(json.dumps(content))
            self._partial.replace(self._path)


def load_status(path: Path) -> dict[str, Any] | None:
    """Read the file; None where there is none."""
    try:
        return dict(parse_json(path.read_text()))
    except FileNotFoundError:
        return None
