"""`python -m megarl.run.ended RUN_DIR WHY`: write that a run has failed whose own process could not, as one killed.

A run that another process holds, that has not begun or whose outcome is known is left as it is.
"""

import sys
from pathlib import Path

from megarl.files import RUN_FILE, CheckpointError, locking
from megarl.report.record import Outcome, State, clear_outcome, load_outcome, write_outcome


def write_if_ours(run_dir: Path, outcome: Outcome | None) -> bool:
    """Write the outcome (None: remove it), unless another process uses the folder; returns whether none does.

    It belongs to the process that holds the lock of the run.
    """
    try:
        with locking(run_dir):
            if outcome is None:
                clear_outcome(run_dir)
            else:
                write_outcome(run_dir, outcome)
            return True
    except CheckpointError:
        return False


def main() -> None:
    run_dir, why = Path(sys.argv[1]), sys.argv[2]
    if (run_dir / RUN_FILE).is_file() and load_outcome(run_dir) is None:
        write_if_ours(run_dir, Outcome(State.failed, why))


if __name__ == "__main__":
    main()
