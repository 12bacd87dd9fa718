"""Servers that give memory back before each call of a role, over the fakes (tests/fakes), whose servers refuse to
generate without their memory and to give it back twice."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fakes.run import World

from megarl.cluster.calls import WorkerError
from megarl.interfaces import UNPUBLISHED
from megarl.report.metrics import load_metrics
from megarl.run.process import Stopped, stopping_on_signals

JOB = (
    *("algo=vapo", "algo.value_pretrain.steps=2", "algo.value_pretrain.patience=null", "rollout.num_servers=2"),
    *("train.num_iterations=3", "train.eval_every=1", "checkpoint.save_every=1"),
)


def read_numbers(run_dir: Path) -> list[dict[str, Any]]:
    timed = ("time/", "perf/", "sync/")
    return [
        {name: value for name, value in line.items() if not name.startswith(timed)}
        for line in load_metrics(run_dir / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    run_dir = tmp_path_factory.mktemp("kept") / "run"
    with pytest.MonkeyPatch.context() as patch:
        World().run_job(patch, run_dir, JOB)
    return read_numbers(run_dir)


@pytest.mark.parametrize("offload", ["kv_cache", "all"])
def test_a_run_is_the_same_with_value_pretraining_evaluations_and_checkpoints(
    offload: str, kept: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    world.run_job(monkeypatch, tmp_path / "run", [*JOB, f"rollout.offload={offload}"])
    assert read_numbers(tmp_path / "run") == kept
    # Once for each rollout of value pretraining and each iteration, also for that of the start.
    assert world.components[0].sync.published == [0, 0, 0, 1, 2, 3]  # type: ignore[attr-defined]


def test_servers_lost_in_a_rollout_or_a_role_lost_in_an_update_make_all_servers_begin_anew(
    kept: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, pending = World(), ["rollout", "update"]

    def lose_server(key: str | None, _number: int) -> None:
        if key == "iteration-2/round-1" and "rollout" in pending:
            pending.remove("rollout")
            world.components[0].servers.lose(0)  # type: ignore[union-attr]

    def lose_role(role: str, verb: str) -> None:
        is_third = sum(entry == ("policy", "update") for entry in world.log) == 3
        if (role, verb) == ("policy", "update") and is_third and "update" in pending:
            pending.remove("update")
            raise WorkerError("policy rank 0/1 died", lost=True)

    world.on_token, world.watch = lose_server, lose_role
    world.run_job(monkeypatch, tmp_path / "run", [*JOB, "rollout.offload=all"])
    assert not pending
    assert read_numbers(tmp_path / "run") == kept
    servers = world.components[-1].servers
    assert servers is not None
    assert [server.num_starts for server in servers.all.values()] == [3, 3]  # type: ignore[attr-defined]


def test_a_signal_in_a_rollout_saves_with_the_servers_memory_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()

    def stop(key: str | None, number: int) -> None:
        if (key, number) == ("iteration-3/round-1", 2):
            os.kill(os.getpid(), signal.SIGTERM)

    world.on_token = stop
    job = [*JOB, "rollout.offload=all", "checkpoint.save_every=100"]
    with stopping_on_signals(), pytest.raises(Stopped):
        world.run_job(monkeypatch, tmp_path / "run", job)
    assert ("policy", "begin_save") in world.log[-6:]
    servers = world.components[0].servers
    assert servers is not None
    for server in servers.all.values():  # type: ignore[attr-defined]
        assert (server.released, server.version) == ({"kv_cache", "weights"}, UNPUBLISHED)
