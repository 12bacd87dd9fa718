"""`python -m megarl.train` with everything real but the processes of the runs: those leave what a run leaves, at once.

Each call is a line of SWEEP_DIR/calls.jsonl. The held-out reward is 1 - |algo.clip_high - 0.25|. A run with
clip_high=0.3 fails as long as there is no SWEEP_DIR/mended, one with clip_high=0.4 is killed the first time.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import megarl.sweep
from megarl.report.record import Outcome, State, write_outcome
from megarl.train import main


def run_process(command: Sequence[str], log: Path, stop_deadline_s: float) -> int:
    _, _, module, *arguments = command
    folder, sweep_dir = log.parent, log.parent.parent
    with (sweep_dir / "calls.jsonl").open("a") as file:
        file.write(json.dumps([module, *arguments]) + "\n")
    clip = float(re.search(r"algo\.clip_high=([0-9.]+)", " ".join(arguments)).group(1))
    if clip == 0.3 and not (sweep_dir / "mended").exists():
        log.write_text("start\nerror: model.path: nothing there\n")
        return 2
    (folder / "run.json").write_text(json.dumps({"overrides": [], "config": {"algo.clip_high": clip}}))
    if clip == 0.4 and not any(text.startswith("resume=") for text in arguments):
        log.write_text("iteration 1/80\n")
        return -9
    write_outcome(folder, Outcome(State.done, results={"iterations": 80, "reward/heldout": 1 - abs(clip - 0.25)}))
    return 0


if __name__ == "__main__":
    megarl.sweep.run_process = run_process
    main()
