"""`slurm/train.sh` when something goes wrong: what is saved, what is queued again, and how often."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from mini_slurm import MiniSlurm, wait_until
from slurm_job import Job
from test_slurm_jobs import HALF_OF_TWO, TINY

pytestmark = pytest.mark.slow

LONG = (*TINY, "algo=lite_ppo", "train.num_iterations=100000", "checkpoint.save_every=100000")
"""A checkpoint is written only where the run is asked to end"""
LONGEST_START_S = 400.0


def kill_process(job: Job, name: str, node: str) -> None:
    """SIGKILL to the job's process of this name (/proc/PID/comm; `driver`: megarl's) on the node, once it is there."""

    def find() -> list[int]:
        found = []
        for pid, environment in job.find_processes().items():
            try:
                process = psutil.Process(pid)
                is_it = (
                    process.name() == name
                    if name != "driver"
                    else environment.get("MEGARL_MARK", "").startswith("driver") and "megarl.train" in process.cmdline()
                )
            except psutil.Error:
                continue
            if is_it and environment.get("SLURMD_NODENAME") == node:
                found.append(pid)
        return found

    wait_until(lambda: bool(find()), LONGEST_START_S, f"{name} on {node}", job.explain)
    for pid in find():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(1800)
@pytest.mark.long
def test_lost_processes_bring_another_start_at_most_twice_without_a_checkpoint(slurm: MiniSlurm, submit) -> None:
    job = submit(*LONG, options=HALF_OF_TWO)
    for start, (name, node) in enumerate([("raylet", "n2"), ("driver", "n1")], 1):
        # The driver has begun, and with it the run.
        wait_until(lambda start=start: count_starts(job) == start, LONGEST_START_S, f"start {start}", job.explain)
        kill_process(job, name, node)
        if start == 1:
            job.wait_state("PENDING")
            (line,) = [line for line in job.output.splitlines() if "requeued" in line]
            assert "Ray has ended" in line
            assert "n2: raylet [exit code=-9]" in line
            job.expect_nothing_left()
            # What a start leaves that ended before its driver began.
            (starts,) = job.run_dir.glob("logs/slurm/starts-*")
            starts.write_text(2 * starts.read_text())
            job.start_again()
    job.wait_state("FAILED")
    assert "the driver was killed by SIGKILL: not requeued: 3 starts brought no checkpoint" in job.output
    outcome = json.loads((job.run_dir / "run.json").read_text())["outcome"]
    assert outcome["state"] == "failed"
    assert "the driver was killed by SIGKILL" in outcome["why"]
    # Ray's own logs of what it was that failed.
    assert (job.run_dir / "logs" / "slurm" / "ray-n2" / "raylet.out").is_file()


def count_starts(job: Job) -> int:
    path: Path = job.run_dir / "run.json"
    return len(json.loads(path.read_text()).get("starts", ())) if path.exists() else 0


def test_a_signal_to_one_task_of_an_array_is_that_tasks_alone(slurm: MiniSlurm, submit) -> None:
    """The last task of an array has the array's own job id."""
    job = submit(*LONG, options=("--array=0-1", "--nodes=1", "--gpus-per-node=2", "--output=slurm-%A_%a.out"))
    first, last = (Job(slurm, f"{job.number}_{task}", job.folder) for task in (0, 1))
    last.wait_for("allocation: 1 nodes x 2 GPUs")
    slurm.call("scancel", first.number)
    first.wait_state("CANCELLED")
    slurm.call("scancel", "--signal=USR1", "--batch", last.number)
    last.wait_state("PENDING")
    assert "SIGUSR1: requeued" in last.output
    assert first.show("JobState") == "CANCELLED"
    assert last.run_dir.is_dir()
