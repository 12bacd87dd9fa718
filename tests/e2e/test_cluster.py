"""Deadlines and deaths on a real local Ray cluster."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray

from megarl.cluster.calls import PendingCall, WorkerError
from megarl.cluster.opened import open_ray, wait_for_nodes
from megarl.config.errors import ConfigError
from megarl.config.schema.root import ClusterConfig
from megarl.interfaces import DeadlineError, wait_all
from megarl.signals import pick_free_port

pytestmark = pytest.mark.slow


@ray.remote(num_cpus=1, max_restarts=0)
class Worker:
    def nap(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def fail(self) -> None:
        raise ValueError("a reason")

    def refuse(self) -> None:
        raise ConfigError(["model.path: a file is damaged"])

    def die(self) -> None:
        os._exit(3)


LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """The scratch folder of a Ray for two actors."""
    before = set(psutil.Process().children(recursive=True))
    with open_ray(ClusterConfig(), num_actors=2) as opened:
        yield opened.scratch
    assert not opened.scratch.exists()
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.fixture(scope="module")
def workers(scratch: Path) -> list:
    actors = [Worker.remote() for _ in range(2)]
    ray.get([actor.nap.remote(0) for actor in actors])
    return actors


def call(ref: ray.ObjectRef, name: str, deadline_s: float = 60.0) -> PendingCall:
    return PendingCall((ref,), (name,), "policy.update", deadline_s, lambda results: results[0])


def test_ray_listens_on_the_loopback_interface_alone(workers: list) -> None:
    listening = {
        (process.name(), socket.laddr.ip)
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]
        for socket in process.net_connections("inet")
        if socket.status == psutil.CONN_LISTEN
    }
    assert {"gcs_server", "raylet", "ray::Worker", "ray::RuntimeEnvAgent"} <= {name for name, _ in listening}
    assert {address for _, address in listening} <= LOOPBACK


def test_no_other_user_gets_into_the_scratch_folder_or_reads_rays_key(scratch: Path, workers: list) -> None:
    assert scratch.stat().st_mode & 0o777 == 0o700
    [key] = scratch.glob("token")
    assert key.stat().st_mode & 0o777 == 0o600
    # Whom the folder lets in, Ray's own folder in it does too.
    assert (scratch / "ray").is_dir()
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(key)


def test_a_driver_without_the_key_is_refused(scratch: Path, workers: list, tmp_path: Path) -> None:
    address = (scratch / "ray" / "address").read_text()
    other = tmp_path / "token"
    other.write_text("0" * 64)
    code = (
        "import ray; from ray._private import ray_constants; ray_constants.ENABLE_RAY_CLUSTER = False;"
        f" from ray._raylet import GcsClient; print(GcsClient(address={address!r}).internal_kv_keys(b'', timeout=20))"
    )
    for path, is_refused in ((other, True), (scratch / "token", False)):
        environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=120)
        assert (b"Unauthenticated" in done.stderr) is is_refused, done.stderr[-3000:]
        assert (done.returncode != 0) is is_refused


def test_results_come_in_the_order_of_the_ranks_and_a_missed_deadline_names_what_and_who_is_late(workers):
    def nap(*seconds: float, deadline_s: float) -> PendingCall:
        refs = tuple(worker.nap.remote(each) for worker, each in zip(workers, seconds, strict=True))
        return PendingCall(refs, ("policy rank 0/2", "policy rank 1/2"), "policy.update", deadline_s, list)

    assert nap(0.2, 0.0, deadline_s=60.0).result() == [0.2, 0.0]
    ended = nap(0.0, 0.0, deadline_s=60.0)
    ray.wait(list(ended.refs), num_returns=2)
    # One look finds them all, also where its own deadline is over: a lost server is started again hours later.
    assert replace(ended, started=ended.started - 100.0).wait(0.0)
    with pytest.raises(DeadlineError, match=r"policy.update: no answer from policy rank 1/2 within 0.5 s"):
        nap(0.0, 3.0, deadline_s=0.5).result()


def test_a_failure_carries_its_reason_and_who_failed_and_what_a_user_can_mend_is_raised_as_such(workers):
    with pytest.raises(WorkerError, match=r"(?s)policy.update: critic rank 0/1 failed:.*a reason"):
        call(workers[0].fail.remote(), "critic rank 0/1").result()
    with pytest.raises(ConfigError) as caught:
        call(workers[0].refuse.remote(), "critic rank 0/1").result()
    assert caught.value.problems == ("critic rank 0/1: model.path: a file is damaged",)


def test_a_death_is_noticed_while_the_other_role_still_works(workers):
    started = time.monotonic()
    critic = call(workers[1].nap.remote(50.0), "critic rank 0/1")
    policy = call(workers[0].die.remote(), "policy rank 0/1")
    with pytest.raises(WorkerError, match="policy rank 0/1 died"):
        wait_all([critic, policy])
    assert time.monotonic() - started < 40
    ray.kill(workers[1])
    workers[:] = [Worker.remote() for _ in range(2)]


def test_nodes_that_do_not_join_are_counted_and_those_that_did_are_named(workers: list) -> None:
    with pytest.raises(DeadlineError, match=r"1 of 2 nodes \(cluster.num_nodes\) have joined Ray within 0.1 s .*: \S+"):
        wait_for_nodes(2, 0.1)
    [node] = wait_for_nodes(1, 0.1)
    assert node.node_id == ray.get_runtime_context().get_node_id()


def test_a_ray_that_does_not_answer_is_named() -> None:
    address = f"127.0.0.1:{pick_free_port('127.0.0.1')}"
    config = ClusterConfig(ray_address=address, worker_start_deadline_s=0.1)
    with pytest.raises(DeadlineError, match=f"nothing listens at {address}"), open_ray(config, num_actors=1):
        pass
