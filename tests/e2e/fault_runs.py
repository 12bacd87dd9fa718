"""Kills (SIGKILL) processes of small runs at random points, and compares how each ends with a run that nobody touched.

    python tests/e2e/fault_runs.py --kills 20    # every process in every phase once
    python tests/e2e/fault_runs.py --kills 50    # then at random
    python tests/e2e/fault_runs.py --kills 20 --max-staleness 2

Each kill has a run of its own, which must end equal to the one that nobody touched. After the driver's death the run is
resumed with resume=RUN_DIR. With rollout.max_staleness > 0 no two runs are equal, since how far generation has run
ahead depends on timing: such a run must have learned from each group once, from nothing older than allowed, and from
what was complete before the kill in the same order. The runs' folders and results.jsonl are in --out, and the command
resumes where it was ended. Exit status 1 where a run ended otherwise.
"""

import argparse
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from megarl.report.metrics import FILE_NAME as METRICS
from megarl.report.metrics import load_metrics
from megarl.report.record import STATUS_NAME as STATUS
from megarl.report.record import load_status
from megarl.rollout.journal import JOURNAL, Journal
from megarl.rollout.rollout_file import FILE_NAME as ROLLOUTS

LOGS = {
    "policy worker": "policy-0.log",
    "critic worker": "critic-0.log",
    "SGLang server": "server-0.log",
    "server's Ray worker": "server-0-owner.log",
}
"""The process -> its log in RUN_DIR/logs, which it has open"""
PROCESSES = (*LOGS, "driver")
PHASES = {"generation": "rollout", "sync": "sync", "update": "update", "checkpoint": "checkpoint"}
"""As the table calls it -> as status.json does"""
GENERATING = ("rollout", "experience")
"""Phases in which the servers generate with rollout.max_staleness > 0, when nobody may wait for them"""
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
PRETRAINING = "value pretraining"
"""A phase beside those of training: the update of one of its iterations"""
MEASURED = ("time/", "perf/", "sync/seconds", "sync/verify_share")
"""Beginnings of the metrics that clocks decide"""
RUN_DEADLINE_S = 600.0
PHASE_DEADLINE_S = 300.0
FIND_DEADLINE_S = 2.0


@dataclass(frozen=True)
class Plan:
    number: int
    process: str
    phase: str
    iteration: int
    delay: float
    """share of the phase's usual duration that passes before the kill"""


@dataclass(frozen=True)
class Outcome:
    plan: dict[str, Any]
    hit: str
    """phase and iteration in which the process was when it was killed"""
    recovered_by: str
    iterations_repeated: int
    rollouts_kept: int
    """of the iterations that were repeated: found in the journal, with rollout.max_staleness > 0 by the group"""
    seconds: float
    problem: str | None
    """None: weights, metrics and rollouts are those of the run that nobody touched; with rollout.max_staleness > 0:
    what `find_problem` looks for is as it must be"""


def list_plans(num_kills: int, num_iterations: int, every: int, seed: int) -> list[Plan]:
    """Every process in every phase first, then at random; the same for the same seed."""
    chooser = random.Random(seed)
    pairs = list(itertools.product(PROCESSES, PHASES))
    pairs += [(chooser.choice(PROCESSES), chooser.choice(list(PHASES))) for _ in range(num_kills - len(pairs))]
    plans = []
    for number, (process, phase) in enumerate(pairs[:num_kills]):
        saved = range(every, num_iterations + 1, every)
        iteration = chooser.choice(list(saved) if phase == "checkpoint" else list(range(1, num_iterations + 1)))
        plans.append(Plan(number, process, phase, iteration, chooser.random()))
    return plans


def start(run_dir: Path, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "megarl.train", *arguments], stdout=output, stderr=subprocess.STDOUT
        )


def find_process(run_dir: Path, process: str, driver: int) -> psutil.Process:
    """The one to kill. Processes come and go while they are listed, so they are listed until it is among them."""
    end = time.monotonic() + FIND_DEADLINE_S
    while time.monotonic() < end:
        found = psutil.Process(driver) if process == "driver" else _find_child(run_dir, process, driver)
        if found is not None:
            return found
    raise RuntimeError(f"no process of the {process} was found")


def _find_child(run_dir: Path, process: str, driver: int) -> psutil.Process | None:
    log = str(run_dir / "logs" / LOGS[process])
    for each in psutil.Process(driver).children(recursive=True):
        try:
            writes = os.readlink(f"/proc/{each.pid}/fd/1") == log
            # Of a server's processes the one that computes.
            if writes and (process != "SGLang server" or "scheduler" in " ".join(each.cmdline())):
                return each
        except (OSError, psutil.Error):
            continue
    return None


def wait_for_phase(run: subprocess.Popen[bytes], run_dir: Path, plan: Plan, max_staleness: int = 0) -> None:
    """Return once the run is in the planned phase of the planned iteration."""
    generates = plan.phase == "generation" and max_staleness > 0
    phases = GENERATING if generates else (PHASES.get(plan.phase, PHASES["update"]),)
    end = time.monotonic() + PHASE_DEADLINE_S
    while time.monotonic() < end:
        if run.poll() is not None:
            raise RuntimeError(f"the run ended with {run.returncode} before {plan.phase} of iteration {plan.iteration}")
        if _is_in(run_dir, plan, phases):
            return
        time.sleep(0.002)
    raise RuntimeError(f"{plan.phase} of iteration {plan.iteration} was not seen within {PHASE_DEADLINE_S:g} s")


def _is_in(run_dir: Path, plan: Plan, phases: tuple[str | None, ...]) -> bool:
    status = load_status(run_dir / STATUS)
    return bool(status and status["iteration"] == plan.iteration and status["phase"] in phases)


def describe(status: dict[str, Any]) -> str:
    names = {name: title for title, name in PHASES.items()}
    phase = status["phase"]
    return f"{names.get(phase, phase) or 'between phases'} of {status['iteration']}"


def kill(run: subprocess.Popen[bytes], run_dir: Path, plan: Plan, usual_s: float, max_staleness: int) -> str:
    """Kill as planned; where the run was then."""
    wait_for_phase(run, run_dir, plan, max_staleness)
    time.sleep(plan.delay * usual_s)
    victim = find_process(run_dir, plan.process, run.pid)
    status = load_status(run_dir / STATUS)
    assert status is not None
    victim.send_signal(signal.SIGKILL)
    return describe(status)


def wait_end(run: subprocess.Popen[bytes]) -> int:
    try:
        return run.wait(RUN_DEADLINE_S)
    except subprocess.TimeoutExpired:
        run.kill()
        raise RuntimeError(f"the run did not end within {RUN_DEADLINE_S:g} s") from None


def strike(plan: Plan, out: Path, reference: dict[str, Any], overrides: list[str]) -> Outcome:
    """One run with one kill, to its end."""
    run_dir = out / f"kill-{plan.number:02d}"
    shutil.rmtree(run_dir, ignore_errors=True)
    log = out / f"kill-{plan.number:02d}.log"
    log.unlink(missing_ok=True)
    started = time.monotonic()
    run = start(run_dir, log, *overrides, f"hydra.run.dir={run_dir}")
    hit, problem, kept, complete = "", None, [], {}
    try:
        hit = kill(run, run_dir, plan, reference["seconds"][plan.phase], find_staleness(overrides))
        complete = list_complete(run_dir)
        kept = [int(path.name.split("-")[1]) for path in (run_dir / "journal").glob("iteration-*.samples")]
        kept += [1 + place // NUM_GROUPS for place in complete]
        code = wait_end(run)
        if plan.process == "driver":
            end_left_over(run_dir)
            code = wait_end(start(run_dir, log, f"resume={run_dir}"))
        problem = f"exit status {code}" if code else compare(run_dir, reference, complete)
    except (RuntimeError, psutil.Error) as error:
        run.kill()
        problem = str(error)
    text = log.read_text(errors="replace")
    if problem is None:
        shutil.rmtree(run_dir)
    begun = [int(n) for n in re.findall(r"resuming from \S*iteration-(-?\d+)", text)]
    reached = int(hit.split()[-1]) if hit else 0
    return Outcome(
        asdict(plan),
        hit,
        find_recovery(plan, text),
        max(0, reached - begun[0]) if begun else 0,
        sum(iteration > begun[0] for iteration in kept) if begun else 0,
        time.monotonic() - started,
        problem,
    )


def find_recovery(plan: Plan, text: str) -> str:
    found = []
    if "was lost:" in text:
        found.append("server started again")
    if re.search(r"restart \d+ of at most \d+ \(checkpoint", text):
        found.append("attempt from checkpoint")
    if plan.process == "driver":
        found.append("resume=")
    return ", ".join(found) or "nothing was needed"


def end_left_over(run_dir: Path) -> None:
    """Wait until every process of a dead driver is gone; raise RuntimeError where one stays."""
    end = time.monotonic() + 60
    while True:
        left = [p.pid for p in psutil.process_iter() if _writes_to(p, run_dir)]
        if not left:
            return
        if time.monotonic() > end:
            raise RuntimeError(f"60 s after the driver was killed processes {left} of its run are still there")
        time.sleep(0.2)


def _writes_to(process: psutil.Process, run_dir: Path) -> bool:
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1").startswith(f"{run_dir}/logs/")
    except OSError:
        return False


def compare(run_dir: Path, reference: dict[str, Any], complete: Mapping[int, int] | None = None) -> str | None:
    """What is other than it must be. complete: `list_complete` at the kill."""
    if max_staleness := find_staleness(reference["overrides"]):
        sizes = {"num_iterations": NUM_ITERATIONS, "num_groups": NUM_GROUPS, "max_staleness": max_staleness}
        return find_problem(run_dir, **sizes, complete=complete or {})
    found = json.loads(json.dumps(summarize(run_dir)))
    wrong = [name for name in ("weights", "rollouts", "metrics") if found[name] != reference[name]]
    return f"other {', '.join(wrong)} than the run that nobody touched" if wrong else None


def summarize(run_dir: Path) -> dict[str, Any]:
    """What two equal runs have in common."""
    lines = load_metrics(run_dir / METRICS)
    return {
        "weights": {role: hash_file(run_dir / role / "model.safetensors") for role in ("policy", "critic")},
        "rollouts": hash_file(run_dir / "rollouts.jsonl"),
        "metrics": drop_measured(lines),
    }


def drop_measured(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if not k.startswith(MEASURED)} for line in lines]


def hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def list_complete(run_dir: Path) -> dict[int, int]:
    """Place -> number of the groups in the journal."""
    return dict(Journal(run_dir / JOURNAL).list_groups(0))


def find_problem(
    run_dir: Path, *, num_iterations: int, num_groups: int, max_staleness: int, complete: Mapping[int, int]
) -> str | None:
    """What does not hold of a run that has ended; None: all does.

    num_groups: of an iteration. complete: the journal at the kill, as `list_complete` gives it.
    """
    lines = load_metrics(run_dir / METRICS)
    found = [line["iteration"] for line in lines if line["iteration"] >= 0]
    if found != list(range(num_iterations + 1)):
        return f"metrics.jsonl has the iterations {found}"
    oldest = max(line["rollout/staleness_max"] for line in lines if line["iteration"] > 0)
    if oldest > max_staleness:
        return f"tokens of {oldest:g} versions behind were learned from"
    taken: dict[int, list[int]] = {}
    for record in _read_lines(run_dir / ROLLOUTS):
        if (problem := _check_versions(record)) is not None:
            return problem
        numbers = taken.setdefault(record["iteration"], [])
        if record["group_number"] not in numbers:
            numbers.append(record["group_number"])
    order = [number for iteration in sorted(taken) for number in taken[iteration]]
    return _check_order(order, num_iterations * num_groups) or _check_repeated(order, complete)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of training's responses; those of value pretraining have no number."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [record for record in records if record["iteration"] > 0]


def _check_versions(record: Mapping[str, Any]) -> str | None:
    versions = record["response"]["weight_versions"]
    if 0 <= min(versions) <= max(versions) < record["iteration"]:
        return None
    return f"iteration {record['iteration']} has tokens of versions {min(versions)} to {max(versions)}"


def _check_order(order: Sequence[int], num_groups: int) -> str | None:
    twice = sorted({number for number in order if order.count(number) > 1})
    lost = sorted(set(range(num_groups)) - set(order))
    beyond = sorted(set(order) - set(range(num_groups)))
    problems = {"twice": twice, "never": lost, "beyond the last": beyond}
    return "; ".join(f"groups learned from {how}: {which}" for how, which in problems.items() if which) or None


def _check_repeated(order: Sequence[int], complete: Mapping[int, int]) -> str | None:
    moved = [place for place, number in complete.items() if order[place] != number]
    return f"groups that were complete before are at other places than {moved}" if moved else None


def find_staleness(overrides: Sequence[str]) -> int:
    """rollout.max_staleness of runs with these overrides."""
    found = [text.split("=")[1] for text in overrides if text.startswith("rollout.max_staleness=")]
    return int(found[-1]) if found else 0


def load_reference(out: Path, overrides: list[str]) -> dict[str, Any]:
    """The run that nobody touched, made if need be."""
    path, run_dir = out / "reference.json", out / "reference"
    if not path.is_file():
        shutil.rmtree(run_dir, ignore_errors=True)
        code = wait_end(start(run_dir, out / "reference.log", *overrides, f"hydra.run.dir={run_dir}"))
        if code:
            sys.exit(f"the run that nobody touches ended with {code}: see {out}/reference.log")
        lines = load_metrics(run_dir / METRICS)
        usual = {
            title: max((line.get(f"time/{name}", 0.0) for line in lines), default=0.0) for title, name in PHASES.items()
        }
        usual[PRETRAINING] = usual["update"]
        path.write_text(json.dumps(summarize(run_dir) | {"seconds": usual, "overrides": overrides}))
    found = dict(json.loads(path.read_text()))
    if found["overrides"] != overrides:
        sys.exit(f"{path} is of other overrides: {' '.join(found['overrides'])}; another --out is needed")
    return found


def print_table(outcomes: list[dict[str, Any]]) -> None:
    print("\n| killed | planned in | was in | recovered by | iterations repeated | kept rollouts | s | same end |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for each in outcomes:
        plan = each["plan"]
        cells = [
            plan["process"],
            f"{plan['phase']} of {plan['iteration']}",
            each["hit"],
            each["recovered_by"],
            each["iterations_repeated"],
            each["rollouts_kept"],
            f"{each['seconds']:.0f}",
            each["problem"] or "yes",
        ]
        print(f"| {' | '.join(map(str, cells))} |")
    print(f"\nsame end: {sum(each['problem'] is None for each in outcomes)} of {len(outcomes)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-staleness", type=int, default=0)
    parser.add_argument("--out", type=Path, help="default: runs/faults, or runs/faults-staleness-N")
    parser.add_argument("overrides", nargs="*", help="of the runs, after those that make them small")
    args = parser.parse_args()
    stale = args.max_staleness
    out = (args.out or Path(f"runs/faults-staleness-{stale}" if stale else "runs/faults")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    ahead = [f"rollout.max_staleness={stale}", "algo.mismatch.correction=tis"] if stale else []
    overrides = [*OVERRIDES, *ahead, *args.overrides]
    reference = load_reference(out, overrides)
    results = out / "results.jsonl"
    done = [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []
    for plan in list_plans(args.kills, num_iterations=NUM_ITERATIONS, every=2, seed=args.seed)[len(done) :]:
        outcome = asdict(strike(plan, out, reference, overrides))
        done.append(outcome)
        with results.open("a") as file:
            file.write(json.dumps(outcome) + "\n")
        print(
            f"{plan.number + 1}/{args.kills} {plan.process} in {plan.phase}: {outcome['problem'] or 'same end'}",
            flush=True,
        )
    print_table(done)
    sys.exit(any(each["problem"] for each in done))


if __name__ == "__main__":
    main()
