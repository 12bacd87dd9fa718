"""Kills (SIGKILL) processes of small runs at random points, and compares how each ends with a run that nobody touched.

    python tests/e2e/fault_runs.py --kills 20    # every process in every phase once
    python tests/e2e/fault_runs.py --kills 50    # then at random

Each kill has a run of its own, which must end equal to the one that nobody touched. After the driver's death the run is
resumed with resume=RUN_DIR. What runs that ended otherwise left is in --out. Exit status 1 where there is one.
"""

import argparse
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from whole_runs import find_marked, start, summarize, train, wait_end, wait_until

from megarl.report.record import load_record
from megarl.rollout.rollout_file import JOURNAL

LOGS = {
    "policy worker": "policy-0.log",
    "critic worker": "critic-0.log",
    "SGLang server": "server-0.log",
    "server's Ray worker": "server-0-owner.log",
}
"""The process -> its log in RUN_DIR/logs, which it has open"""
PROCESSES = (*LOGS, "driver")
PHASES = {"generation": "rollout", "sync": "sync", "update": "update", "checkpoint": "checkpoint"}
"""As the table calls it -> as run.json does"""
PRETRAINING = "value pretraining"
"""A phase beside those of training: the update of one of its iterations"""
NUM_ITERATIONS, NUM_GROUPS = 4, 8
OVERRIDES = (
    "algo=vapo",
    "model=tiny",
    "algo.value_pretrain.steps=3",
    f"train.prompts_per_iteration={NUM_GROUPS}",
    "train.responses_per_prompt=8",
    "train.samples_per_minibatch=32",
    f"train.num_iterations={NUM_ITERATIONS}",
    f"train.eval_every={NUM_ITERATIONS}",
    "checkpoint.save_every=2",
    "logger.save_rollouts=true",
    "logger.tensorboard=false",
)
PHASE_DEADLINE_S = 300.0


class Plan(NamedTuple):
    process: str
    phase: str
    iteration: int
    delay_s: float
    """from the phase's beginning to the kill"""


def list_plans(num_kills: int, seed: int) -> list[Plan]:
    """Every process in every phase first, then at random; the same for the same seed."""
    chooser = random.Random(seed)
    pairs = list(itertools.product(PROCESSES, PHASES))
    pairs += [(chooser.choice(PROCESSES), chooser.choice(list(PHASES))) for _ in range(num_kills - len(pairs))]
    plans = []
    for process, phase in pairs[:num_kills]:
        # A checkpoint is written every second iteration.
        iterations = range(2, NUM_ITERATIONS + 1, 2) if phase == "checkpoint" else range(1, NUM_ITERATIONS + 1)
        plans.append(Plan(process, phase, chooser.choice(iterations), 0.3 * chooser.random()))
    return plans


def find_process(run_dir: Path, process: str, driver: int) -> psutil.Process:
    """The one to kill. Processes come and go while they are listed, so they are listed until it is among them."""
    log, end = str(run_dir / "logs" / LOGS.get(process, "")), time.monotonic() + 2.0
    while time.monotonic() < end:
        if process == "driver":
            return psutil.Process(driver)
        for each in psutil.Process(driver).children(recursive=True):
            try:
                writes = os.readlink(f"/proc/{each.pid}/fd/1") == log
                # Of a server's processes the one that computes.
                if writes and (process != "SGLang server" or "scheduler" in " ".join(each.cmdline())):
                    return each
            except (OSError, psutil.Error):
                continue
    raise RuntimeError(f"no process of the {process} was found")


def wait_for_phase(run: "subprocess.Popen[str]", run_dir: Path, phases: tuple[str, ...], iteration: int) -> None:
    """Return once the run is in one of the phases of the iteration."""
    what, end = f"{' or '.join(phases)} of iteration {iteration}", time.monotonic() + PHASE_DEADLINE_S
    while time.monotonic() < end:
        if run.poll() is not None:
            raise RuntimeError(f"the run ended with {run.returncode} before {what}")
        status = load_record(run_dir).get("status")
        if status and status["iteration"] == iteration and status["phase"] in phases:
            return
        time.sleep(0.002)
    raise RuntimeError(f"{what} was not seen within {PHASE_DEADLINE_S:g} s")


def kill(run: "subprocess.Popen[str]", run_dir: Path, plan: Plan) -> tuple[str, int]:
    """Kill as planned; (phase, iteration) in which the run was then."""
    wait_for_phase(run, run_dir, ((PHASES | {PRETRAINING: "update"})[plan.phase],), plan.iteration)
    time.sleep(plan.delay_s)
    victim = find_process(run_dir, plan.process, run.pid)
    status = load_record(run_dir).get("status")
    assert status is not None
    victim.kill()
    titles = {name: title for title, name in PHASES.items()}
    return titles.get(status["phase"], status["phase"]) or "between phases", status["iteration"]


def strike(run_dir: Path, plan: Plan, overrides: list[str], expected: Mapping[str, Any]) -> dict[str, Any]:
    """One run with one kill, to its end: a row of the table. expected: `summarize` of the run that nobody touched."""
    log = run_dir.with_suffix(".log")
    log.unlink(missing_ok=True)
    shutil.rmtree(run_dir, ignore_errors=True)
    begin = time.monotonic()
    run = start(*overrides, f"hydra.run.dir={run_dir}", log=log)
    phase, reached, kept = "", 0, []
    try:
        phase, reached = kill(run, run_dir, plan)
        kept = [int(path.name.split("-")[1]) for path in (run_dir / JOURNAL).glob("iteration-*.samples")]
        code, _ = wait_end(run)
        if plan.process == "driver":
            wait_until(lambda: not find_marked(run_dir / "logs"), "the end of a dead driver's processes", 60)
            code, _ = wait_end(start(f"resume={run_dir}", log=log))
        if code:
            problem: str | None = f"exit status {code}"
        else:
            found = summarize(run_dir)
            wrong = [name for name in found if found[name] != expected[name]]
            problem = f"other {', '.join(wrong)} than the run that nobody touched" if wrong else None
    except (RuntimeError, AssertionError, psutil.Error) as error:
        run.kill()
        problem = str(error)
    text = log.read_text(errors="replace")
    if problem is None:
        shutil.rmtree(run_dir)
    ways = {
        "server restarted": "was lost:" in text,
        "new attempt from checkpoint": re.search(r"restart \d+ of at most \d+ \(checkpoint", text),
        "`resume=RUN_DIR`": plan.process == "driver",
    }
    begun = [int(n) for n in re.findall(r"resuming from \S*iteration-(-?\d+)", text)] or [reached]
    return {
        "killed": plan.process,
        "planned in": f"{plan.phase} of {plan.iteration}",
        "was in": f"{phase} of {reached}",
        "recovered by": ", ".join(way for way, was_it in ways.items() if was_it) or "nothing was needed",
        f"iterations trained again, of {NUM_ITERATIONS}": max(0, reached - begun[0]),
        "of them from the journal": sum(iteration > begun[0] for iteration in kept) if reached > begun[0] else 0,
        "seconds": round(time.monotonic() - begin),
        "as it must be": problem or "yes",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/faults"))
    parser.add_argument("overrides", nargs="*", help="of the runs, after those that make them small")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    overrides = [*OVERRIDES, *args.overrides]
    shutil.rmtree(out / "reference", ignore_errors=True)
    train(*overrides, f"hydra.run.dir={out}/reference")
    expected = summarize(out / "reference")
    rows = []
    for number, plan in enumerate(list_plans(args.kills, args.seed)):
        rows.append(strike(out / f"kill-{number:02d}", plan, overrides, expected))
        if number == 0:
            print(f"| {' | '.join(rows[0])} |\n| {' | '.join('---' for _ in rows[0])} |")
        print(f"| {' | '.join(map(str, rows[-1].values()))} |", flush=True)
    num_right = sum(row["as it must be"] == "yes" for row in rows)
    print(f"\nas they must be: {num_right} of {len(rows)}")
    sys.exit(num_right < len(rows))


if __name__ == "__main__":
    main()
