"""`python -m megarl.train -m hydra/launcher=slurm` on a real Slurm: each run is a job."""

import getpass
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mini_slurm import MiniSlurm

from megarl.report.record import load_sweep

pytestmark = pytest.mark.slow

TINY = (
    *("rollout.transport=split", "rollout.response_length=16", "cluster.object_store_mb=100"),
    *("train.prompts_per_iteration=4", "train.responses_per_prompt=4", "train.samples_per_minibatch=16"),
    *("train.num_iterations=1", "train.num_eval_prompts=8", "algo.value_pretrain.steps=1"),
)
JOB = ("hydra/launcher=slurm", "hydra.launcher.nodes=2", "hydra.launcher.gpus_per_node=2")


def test_a_sweep_for_a_partition_that_does_not_exist_ends_with_what_sbatch_says(
    slurm: MiniSlurm, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "megarl.train", "-m", *JOB, "algo=vapo", "algo.clip_high=0.2,0.28"]
    done = subprocess.run(
        [*command, f"hydra.sweep.dir={tmp_path}/sweep", "hydra.launcher.partition=none"],
        env=os.environ | slurm.environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: hydra.launcher: sbatch: ")
    assert last.endswith("Batch job submission failed: Invalid partition name specified")
    assert slurm.call("squeue", "--noheader").stdout == ""


@pytest.mark.timeout(900)
def test_each_run_of_a_sweep_is_a_job(slurm: MiniSlurm, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megarl.train", "-m", *JOB, *TINY, "algo=vapo", "algo.clip_high=0.2,0.28"]
    try:
        done = subprocess.run(
            [*command, f"hydra.sweep.dir={tmp_path}/sweep"],
            env=os.environ | slurm.environment | {"MEGARL_PYTHON": sys.executable},
            capture_output=True, text=True, timeout=800,
        )  # fmt: skip
    finally:
        # What is left of a sweep that ended early has both nodes to itself.
        slurm.call("scancel", f"--user={getpass.getuser()}", check=False)
    sweep = load_sweep(tmp_path / "sweep")
    logs = [path.read_text()[-3000:] for path in (tmp_path / "sweep").glob("*/output.log")]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
    assert [run.state for run in sweep] == ["done", "done"]
    for run in sweep:
        assert (tmp_path / "sweep" / run.name / "logs" / "slurm").is_dir()
        assert run.config["cluster.num_nodes"] == 2
