"""Runs whose processes are killed or that are asked to stop end as the one that nobody touched, bit for bit. They train
on a mix of two sources, of which each has a reward of its own.

With MEGARL_KILLS=20 every process is killed in every phase once, of more kills the rest are at random.
"""

import itertools
import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from whole_runs import find_marked, start, summarize, train, wait_end, wait_until

from megarl.report.record import load_record

pytestmark = pytest.mark.slow

LOGS = {
    "policy worker": "policy-0.log",
    "critic worker": "critic-0.log",
    "SGLang server": "server-0.log",
    "server's Ray worker": "server-0-owner.log",
}
"""The process -> its log in RUN_DIR/logs, which it has open"""
PROCESSES = (*LOGS, "driver")
PHASES = {"generation": "rollout", "sync": "sync", "update": "update", "checkpoint": "checkpoint"}
"""As docs/results/fault-injection.csv calls it -> as run.json does"""
PRETRAINING = "value pretraining"
"""A phase beside those of training: the update of one of its iterations"""
NUM_ITERATIONS = 4
LETTERS = "{kind: letter_count, num_heldout: 4, options: {letters: %s, max_dots: 4}, %s}"
OVERRIDES = (
    *("algo=vapo", "model=tiny", "algo.value_pretrain.steps=3", "train.prompts_per_iteration=8"),
    *("train.responses_per_prompt=8", "train.samples_per_minibatch=32", f"train.num_iterations={NUM_ITERATIONS}"),
    *(f"train.eval_every={NUM_ITERATIONS}", "checkpoint.save_every=2", "logger.save_rollouts=true"),
    *("logger.tensorboard=false", "data=mix", "data.share_by=tokens", "data.prompt_length=32"),
    f"data.sources.long={LETTERS % ('abc', 'share: 0.6, reward: {kind: letter_count}')}",
    f"data.sources.few={LETTERS % ('def', 'share: 0.4, reward_scale: 0.5, response_length: 12')}",
    *("data.sources.few.reward.kind=function", f"data.sources.few.reward.path='{Path(__file__).parent}/few.py:score'"),
)
PHASE_DEADLINE_S = 300.0


class Plan(NamedTuple):
    process: str
    phase: str
    iteration: int
    delay_s: float
    """from the phase's beginning to the kill"""


def list_plans(num_kills: int) -> list[Plan]:
    """Every process in every phase first, then at random; the same each time."""
    chooser = random.Random(1)
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


def kill(run: "subprocess.Popen[str]", run_dir: Path, plan: Plan) -> None:
    wait_for_phase(run, run_dir, ((PHASES | {PRETRAINING: "update"})[plan.phase],), plan.iteration)
    time.sleep(plan.delay_s)
    find_process(run_dir, plan.process, run.pid).kill()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def reference(out: Path) -> dict[str, Any]:
    """The run that nobody touches, in out/reference."""
    train(*OVERRIDES, f"hydra.run.dir={out}/reference")
    found = summarize(out / "reference")
    last = found["metrics"][-1].keys()
    assert {f"source/{name}/{each}" for name in ("long", "few") for each in ("reward", "epochs")} <= last
    assert {"eval/long/correct", "eval/few/reward_mean"} <= last
    return found


RUNS = [(plan,) for plan in list_plans(int(os.environ.get("MEGARL_KILLS", "0")))] or [
    # Each way of going on once, and after a step of value pretraining. All other places: unit/loop/test_loop_resume.py,
    # over the fakes; servers that are killed: test_server_restarts.py
    (Plan("critic worker", PRETRAINING, 0, delay_s=0.1), Plan("driver", "generation", 3, delay_s=0.1))
]


@pytest.mark.parametrize(
    "plans", RUNS, ids=lambda plans: ", ".join(f"{x.process} in {x.phase} of {x.iteration}" for x in plans)
)
def test_a_run_with_killed_processes_ends_with_the_same_weights_metrics_and_rollouts(
    plans: tuple[Plan, ...], tmp_path: Path, reference: dict[str, Any]
) -> None:
    run_dir, log = tmp_path / "killed", tmp_path / "killed.log"
    run = start(*OVERRIDES, f"hydra.run.dir={run_dir}", log=log)
    try:
        for plan in plans:
            kill(run, run_dir, plan)
        code, _ = wait_end(run)
    finally:
        run.kill()
    if plans[-1].process == "driver":
        wait_until(lambda: not find_marked(run_dir / "logs"), "the end of a dead driver's processes", 60)
        code, _ = wait_end(start(f"resume={run_dir}", log=log))
    text = log.read_text(errors="replace")
    assert code == 0, text[-5000:]
    assert summarize(run_dir) == reference
    if plans[0].phase == PRETRAINING:
        assert re.search(r"resuming from\s+\S*/checkpoints/iteration--00002\n", text)


@pytest.mark.long
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_in_another_layout_from_the_checkpoint_that_is_whole(
    out: Path, reference: dict[str, Any]
) -> None:
    run_dir, log = out / "stopped", out / "stopped.log"
    run = start(*OVERRIDES, f"hydra.run.dir={run_dir}", log=log, new_session=True)
    wait_for_phase(run, run_dir, ("rollout",), 4)
    # As Slurm does it: to all processes of the job step, Ray's among them.
    os.killpg(run.pid, signal.SIGUSR1)
    assert wait_end(run)[0] == 128 + signal.SIGUSR1, log.read_text()
    # 3 is no multiple of checkpoint.save_every=2.
    assert (run_dir / "checkpoints" / "latest").read_text() == "iteration-000003\n"
    assert json.loads((run_dir / "checkpoints" / "iteration-000003" / "state.json").read_text())["iteration"] == 3
    damaged = next((run_dir / "checkpoints" / "iteration-000003" / "critic").glob("*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(bytes(content))
    two = ["policy.parallel.num_processes=2", "policy.parallel.tp=2", "critic.parallel.num_processes=2"]
    assert wait_end(start(f"resume={run_dir}", *two, log=log))[0] == 0, log.read_text()
    text = (run_dir / "train.log").read_text()
    assert f"critic: damaged: {damaged.name}; renamed to iteration-000003.damaged" in text
    assert re.search(r"resuming from \S*iteration-000002", text)
    lines = summarize(run_dir)["metrics"]
    assert [line["iteration"] for line in lines] == [-3, -2, -1, 0, 1, 2, 3, 4]
    # The third iteration's responses were in the journal; what the other layout computes of them is the same.
    for name, expected in reference["metrics"][3].items():
        if name.startswith(("reward/", "policy/", "critic/")):
            assert lines[3][name] == pytest.approx(expected, rel=1e-3, abs=1e-5), name
