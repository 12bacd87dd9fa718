"""When an attempt is worth another one, and who is started when."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from megarl.cluster.calls import WorkerError
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.interfaces import DeadlineError, SyncError
from megarl.run.attempts import is_loss, run_job
from megarl.run.job import wait_started


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (WorkerError("critic rank 0/1 died", lost=True), True),
        (DeadlineError("policy.update: no answer"), True),
        (caused_by(SyncError("the policy's ranks"), WorkerError("policy rank 1/2 died", lost=True)), True),
        # These would fail again.
        (WorkerError("policy rank 0/1 failed: FloatingPointError"), False),
        (SyncError("the servers do not hold the weights"), False),
        (caused_by(RuntimeError("a"), ValueError("b")), False),
    ],
)
def test_a_dead_process_or_one_that_gives_no_answer_is_a_loss(error: Exception, is_one: bool):
    assert is_loss(error) is is_one


def test_a_job_that_does_not_fit_its_gpus_is_refused_before_it_takes_its_folder(tmp_path: Path) -> None:
    gpu = ["cluster=h100x8", "cluster.hardware.memory_gib=1"]
    config = load_config(["algo=grpo", "model=tiny", *gpu])
    with pytest.raises(ConfigError) as caught:
        run_job(config, tmp_path / "run")
    assert any("GiB of 1.0" in problem for problem in caught.value.problems)
    assert caught.value.problems[-1].startswith("cluster.hardware: the job does not fit H100 SXM5 80 GB; ")
    assert not (tmp_path / "run").exists()


@dataclass
class Starting:
    """A `Pending` that ends, or fails, at the second look, and notes that."""

    name: str
    events: list[str]
    fails: bool = False
    num_looks: int = 0

    def wait(self, timeout_s: float) -> bool:
        self.num_looks += 1
        if self.fails:
            raise RuntimeError(f"{self.name} failed")
        if self.num_looks == 2:
            self.events.append(f"{self.name} ready")
        return self.num_looks >= 2

    def result(self) -> list[str]:
        return []


@pytest.mark.parametrize(
    ("roles_first", "expected"),
    [
        (True, ["policy ready", "critic ready", "servers begin", "servers ready"]),
        (False, ["servers begin", "servers ready", "policy ready", "critic ready"]),
    ],
)
def test_servers_that_share_gpus_start_once_every_role_is_ready_and_others_beside_them(
    roles_first: bool, expected: list[str]
) -> None:
    events: list[str] = []

    def start_servers() -> Starting:
        events.append("servers begin")
        return Starting("servers", events)

    wait_started([Starting("policy", events), Starting("critic", events)], start_servers, roles_first=roles_first)
    assert events == expected
    del events[:]
    with pytest.raises(RuntimeError, match="policy failed"):
        wait_started([Starting("policy", events, fails=True)], start_servers, roles_first=roles_first)
    assert events == ["servers begin"] * (not roles_first)
