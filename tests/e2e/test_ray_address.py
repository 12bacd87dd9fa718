"""Runs in a Ray that was started by hand, as docs/ray-clusters.md says."""

import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from whole_runs import find_marked, start, train, wait_end, wait_for_iteration, wait_until

from megarl.report.record import State, load_metrics, load_outcome
from megarl.signals import pick_free_port

pytestmark = pytest.mark.slow

SMALL = (
    *("train.num_iterations=2", "train.samples_per_iteration=16", "train.samples_per_minibatch=16"),
    *("train.num_eval_prompts=2", "algo=reinforce_pp", "train.eval_every=100"),
)


@pytest.fixture
def ray_address(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """HOST:PORT of a Ray that `ray start` starts, and that must still be there after the test."""
    # Ray uses a user's key where there is one, and listens on all interfaces.
    key = short_path / "token"
    key.write_text(secrets.token_hex(32))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(key))
    # It would kill the run where others fill the machine's memory.
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    port = pick_free_port("127.0.0.1")
    start = ("start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=4")
    more = ("--include-dashboard=false", "--object-store-memory=268435456", f"--temp-dir={short_path}")
    process = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", *start, *more],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"127.0.0.1:{port}"
        assert process.poll() is None
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        process.wait(60)
        _, alive = psutil.wait_procs(children, timeout=60)
        for each in alive:
            each.kill()


def is_listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
        return True
    except OSError:
        return False


def test_a_run_joins_a_ray_started_by_hand_and_another_one_after_a_stop(ray_address: str, tmp_path: Path) -> None:
    # A run itself waits for the Ray a few seconds only.
    wait_until(lambda: is_listening(ray_address), "Ray to start")
    train(*SMALL, f"cluster.ray_address={ray_address}", f"hydra.run.dir={tmp_path}/a")
    lines = load_metrics(tmp_path / "a" / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [0, 1, 2]
    for name in ("policy", "servers"):
        assert all(line[f"perf/{name}_peak_memory_gb"] > 0.1 for line in lines[1:])
    # The address of the environment, and an end by a signal, after which the Ray has none of the run's processes.
    more = ("train.num_iterations=1000", "cluster.ray_address=auto", f"hydra.run.dir={tmp_path}/b")
    second = start(*SMALL, *more, RAY_ADDRESS=ray_address)
    wait_for_iteration(second, tmp_path / "b")
    second.send_signal(signal.SIGTERM)
    code, printed = wait_end(second)
    assert code == 128 + signal.SIGTERM, printed
    assert load_outcome(tmp_path / "b").state is State.stopped
    wait_until(lambda: not find_marked(tmp_path / "b"), "the run's processes to end")
