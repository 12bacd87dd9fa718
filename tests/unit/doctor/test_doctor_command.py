"""`python -m megarl.doctor` as it is called, on this machine."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarl.doctor.judge import assume_allocation

LONGEST_SCREEN = 40


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Outside of a Slurm job."""
    command = [sys.executable, "-m", "megarl.doctor", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_the_default_job_can_run_where_the_tests_run() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "it can run here"
    assert any(line.split()[:2] == ["torch", importlib.metadata.version("torch")] for line in lines if line)
    assert len(lines) <= LONGEST_SCREEN
    assert done.stderr == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_a_job_for_a_cluster_is_told_all_that_is_missing_here() -> None:
    done = run("algo=vapo", "model=qwen32b", "cluster=gpu", "model.path=nobody/nothing", "policy.fp8=hybrid")
    assert done.returncode == 1, done.stdout + done.stderr
    for text in ("GPUs on one node", "sglang-kernel", "policy.fp8", "model.path: 'nobody/nothing'"):
        assert text in done.stdout
    if torch.version.cuda is None:
        assert "a CPU build" in done.stdout
        assert "make install PLATFORM=cuda" in done.stdout
    assert len(done.stdout.splitlines()) <= LONGEST_SCREEN
    assert done.stderr == ""


def test_slurms_cluster_is_judged_on_a_login_node_by_what_the_script_asks_for() -> None:
    done = run("algo=vapo", "model=qwen32b", "cluster=slurm", "rollout.kv_cache_tokens=20000")
    assert done.returncode == (0 if done.stdout.endswith("it can run here\n") else 1), done.stdout + done.stderr
    screen = " ".join(done.stdout.split())
    assert "request of slurm/train.sh: cluster.num_nodes=8, cluster.gpus_per_node=8 -> set these keys" in screen
    assert done.stderr == ""


def test_what_is_assumed_of_a_slurm_job_yields_to_the_command_line_and_to_a_job(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/bash\n#SBATCH --nodes=3\n#SBATCH --gpus-per-node=4\n#SBATCH --mem=0\nnodes=7\n")
    slurm = ["algo=vapo", "cluster=slurm"]
    assert assume_allocation(slurm, {}, script) == ["cluster.num_nodes=3", "cluster.gpus_per_node=4"]
    assert assume_allocation([*slurm, "cluster.num_nodes=2"], {}, script) == ["cluster.gpus_per_node=4"]
    assert assume_allocation(slurm, {"SLURM_JOB_NUM_NODES": "2"}, script) == []
    assert assume_allocation(["cluster=h100x8"], {}, script) == []


@pytest.mark.parametrize(
    ("argument", "message"),
    [("algo.clip=3", "algo.clip: no such key; did you mean algo.clip_low?"), ("--gpus", "--gpus: no such option")],
)
def test_a_bad_configuration_is_told_and_nothing_else(argument: str, message: str) -> None:
    done = run(argument)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""
