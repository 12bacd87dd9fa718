"""`python -m megarl.doctor` as it is called, on this machine."""

import subprocess
import sys

import pytest
import torch

LONGEST_SCREEN = 40


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megarl.doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_default_job_can_run_where_the_tests_run() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "it can run here"
    assert any(line.split()[:2] == ["torch", torch.__version__] for line in lines if line)
    assert len(lines) <= LONGEST_SCREEN
    assert done.stderr == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_a_job_for_a_cluster_is_told_all_that_is_missing_here() -> None:
    done = run("algo=vapo", "model=qwen32b", "cluster=gpu", "model.path=nobody/nothing", "policy.fp8=hybrid")
    assert done.returncode == 1, done.stdout + done.stderr
    for text in ("GPUs on one node", "a CPU build", "sglang-kernel", "policy.fp8", "model.path: 'nobody/nothing'"):
        assert text in done.stdout
    assert "make install PLATFORM=cuda" in done.stdout
    assert len(done.stdout.splitlines()) <= LONGEST_SCREEN
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("argument", "message"),
    [("algo.clip=3", "algo.clip: no such key; did you mean algo.clip_low?"), ("--gpus", "--gpus: no such option")],
)
def test_a_bad_configuration_is_told_and_nothing_else(argument: str, message: str) -> None:
    done = run(argument)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""
