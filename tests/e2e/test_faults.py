"""Runs whose processes are killed or that are asked to stop end as the one that nobody touched, bit for bit."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import fault_runs as faults
import pytest
from whole_runs import start, summarize, train, wait_end

from megarl.report.page import format_comparison
from megarl.report.record import load_sweep

pytestmark = pytest.mark.slow

OVERRIDES = list(faults.OVERRIDES)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def reference(out: Path) -> dict[str, Any]:
    """The run that nobody touches, in out/reference."""
    train(*OVERRIDES, f"hydra.run.dir={out}/reference")
    return summarize(out / "reference")


@pytest.mark.parametrize(
    "plan",
    [
        # Each way of going on once: of fault_runs.py's twenty, and after a step of value pretraining. All other places:
        # unit/loop/test_loop_resume.py, over the fakes; servers that are killed: test_server_restarts.py
        faults.Plan("driver", "generation", 3, delay_s=0.1),
        faults.Plan("critic worker", faults.PRETRAINING, 0, delay_s=0.1),
    ],
    ids=lambda plan: plan.process,
)
def test_a_run_with_a_killed_process_ends_with_the_same_weights_metrics_and_rollouts(
    plan: faults.Plan, tmp_path: Path, reference: dict[str, Any]
) -> None:
    row = faults.strike(tmp_path / "killed", plan, OVERRIDES, reference)
    text = (tmp_path / "killed.log").read_text()
    assert row["as it must be"] == "yes", text[-5000:]
    if plan.phase == faults.PRETRAINING:
        assert re.search(r"resuming from\s+\S*/checkpoints/iteration--00002\n", text)


@pytest.mark.timeout(900)
def test_a_run_of_a_sweep_ends_as_the_run_alone_and_makes_a_page(out: Path, reference: dict[str, Any]) -> None:
    command = ("-m", *OVERRIDES, "algo.clip_high=0.28", f"hydra.sweep.dir={out}/sweep")
    assert "1 of 1 runs done" in train(*command)
    sweep = load_sweep(out / "sweep")
    assert [run.state for run in sweep] == ["done"]
    run_dir = out / "sweep" / sweep[0].name
    assert summarize(run_dir) == reference
    page = format_comparison("Sweep", sweep)
    for text in ("Held-out reward", "Value loss", "Response length", "algo.clip_high"):
        assert text in page
    assert not json.loads((run_dir / "run.json").read_text())["outcome"]["why"]
    assert train(*command).count("already done") == 1


def test_a_run_that_is_asked_to_stop_saves_and_goes_on_in_another_layout_from_the_checkpoint_that_is_whole(
    out: Path, reference: dict[str, Any]
) -> None:
    run_dir, log = out / "stopped", out / "stopped.log"
    run = start(*OVERRIDES, f"hydra.run.dir={run_dir}", log=log, new_session=True)
    faults.wait_for_phase(run, run_dir, ("rollout",), 4)
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
