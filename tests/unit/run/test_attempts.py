"""When an attempt is worth another one."""

from pathlib import Path

import pytest

from megarl.cluster.calls import WorkerError
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.interfaces import DeadlineError, SyncError
from megarl.run.attempts import is_loss, run_job


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        WorkerError("critic rank 0/1 died", lost=True),
        DeadlineError("policy.update: no answer"),
        caused_by(SyncError("the policy's ranks"), WorkerError("policy rank 1/2 died", lost=True)),
    ],
)
def test_a_dead_process_or_one_that_gives_no_answer_is_a_loss(error: Exception):
    assert is_loss(error)


@pytest.mark.parametrize(
    "error",
    [
        WorkerError("policy rank 0/1 failed: FloatingPointError"),
        SyncError("the servers do not hold the weights"),
        caused_by(RuntimeError("a"), ValueError("b")),
    ],
)
def test_what_would_fail_again_is_none(error: Exception):
    assert not is_loss(error)


def test_a_job_that_does_not_fit_its_gpus_is_refused_before_it_takes_its_folder(tmp_path: Path) -> None:
    gpu = ["cluster=h100x8", "cluster.hardware.memory_gib=1"]
    config = load_config(["algo=grpo", "model=tiny", *gpu])
    with pytest.raises(ConfigError) as caught:
        run_job(config, tmp_path / "run")
    assert any("GiB of 1.0" in problem for problem in caught.value.problems)
    assert caught.value.problems[-1].startswith("cluster.hardware: the job does not fit H100 SXM5 80 GB; ")
    assert not (tmp_path / "run").exists()
