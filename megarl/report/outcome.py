"""RUN_DIR/outcome.json: how a run ended.

{"state": "done", "why": "", "results": {"iterations": 80, "reward/heldout": 0.98}}

`state` is done, failed or stopped (by a signal, after its checkpoint was written); `why` is the reason where it is not
done, and what ended it where it is done before its last iteration. A run that is in progress, or whose process was
killed, has no such file.
"""

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from megarl.json_text import parse_json

FILE_NAME = "outcome.json"
LONGEST_WHY = 2000


class State(Enum):
    done = "done"
    failed = "failed"
    stopped = "stopped"


@dataclass(frozen=True)
class Outcome:
    state: State
    why: str = ""
    results: Mapping[str, float] = field(default_factory=dict)
    """The numbers of the line `done: ...`, without those that are not finite"""


def write_outcome(run_dir: Path, outcome: Outcome) -> None:
    """Write the file atomically. Where the disk is full there is no file."""
    results = {name: value for name, value in outcome.results.items() if math.isfinite(value)}
    content = {"state": outcome.state.value, "why": outcome.why[:LONGEST_WHY], "results": results}
    partial = run_dir / f".{FILE_NAME}.partial"
    with contextlib.suppress(OSError):
        run_dir.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content, indent=1), encoding="utf-8")
        partial.replace(run_dir / FILE_NAME)


def clear_outcome(run_dir: Path) -> None:
    """Remove the file: the run has not ended."""
    (run_dir / FILE_NAME).unlink(missing_ok=True)


def load_outcome(run_dir: Path) -> Outcome | None:
    """Read the file; None where there is none. Raises ValueError naming the file where it is not valid."""
    path = run_dir / FILE_NAME
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        results = {str(name): value for name, value in content["results"].items()}
        if not all(isinstance(value, int | float) and math.isfinite(value) for value in results.values()):
            raise ValueError("a result is not a finite number")
        return Outcome(State(content["state"]), str(content["why"]), results)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: is not what a run writes: {error!r}") from None
