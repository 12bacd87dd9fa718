"""Faults of Ray itself and signals while it starts: the driver ends by its own word, and leaves nothing behind; runs in
a Ray that was started by hand, as docs/slurm.md says.
"""

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from whole_runs import find_marked, start, wait_end, wait_for_iteration, wait_until

from megarl.report.record import State, load_metrics, load_outcome
from megarl.signals import pick_free_port

pytestmark = pytest.mark.slow

DRIVER = Path(__file__).with_name("ray_driver.py")
RAY_DEADLINE_S = 30.0
PATIENCE_S = 240.0
LATE = rf"Ray.* (within|for) {RAY_DEADLINE_S:g} s \(cluster.ray_deadline_s\): store"


class Driver:
    """A driver process and all that it has started, also what is no child of it any more."""

    def __init__(self, folder: Path, deadline_s: float):
        self.progress, self.log = folder / "progress", folder / "driver.log"
        with self.log.open("wb") as log:
            command = [sys.executable, str(DRIVER), str(self.progress), str(deadline_s)]
            self.run = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self.seen: set[psutil.Process] = set()

    def wait_until(self, holds: Callable[[], object], what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not holds():
            assert self.run.poll() is None, f"before {what}: {self.log.read_text()}"
            assert time.monotonic() < end, f"{what}: {self.log.read_text()}"
            self.look()
            time.sleep(0.02)

    def look(self) -> None:
        self.seen |= {*psutil.Process(self.run.pid).children(recursive=True)}

    def find(self, name: str) -> psutil.Process | None:
        self.look()
        for process in self.seen:
            try:
                if process.name().startswith(name):
                    return process
            except psutil.NoSuchProcess:
                continue
        return None

    def wait_steps(self, word: str) -> None:
        self.wait_until(lambda: self.progress.exists() and word in self.progress.read_text(), word)

    def end(self) -> int:
        """The exit code, once the driver has ended. Asserts that nothing is left of it."""
        scratch = {*Path("/tmp").glob(f"megarl-{self.run.pid}-*")}
        code = self.run.wait(PATIENCE_S)
        _, left = psutil.wait_procs(self.seen, timeout=10.0)
        assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
        assert not [path for path in scratch if path.exists()]
        return code


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def start_one(deadline_s: float = RAY_DEADLINE_S) -> Driver:
        drivers.append(Driver(tmp_path, deadline_s))
        return drivers[-1]

    yield start_one
    for driver in drivers:
        if driver.run.poll() is None:
            driver.run.kill()
        for process in driver.seen:
            if process.is_running():
                process.kill()


@pytest.mark.parametrize(
    ("process", "fault", "message"),
    [
        ("raylet", psutil.Process.suspend, LATE),
        ("raylet", psutil.Process.kill, r"Ray's process raylet has died: store"),
        ("ray::RuntimeEnv", psutil.Process.kill, ""),
    ],
)
def test_a_process_of_ray_that_stops_or_dies_ends_the_run_with_what_was_asked_of_it_and_leaves_nothing(
    process: str, fault: Callable[[psutil.Process], None], message: str, begin: Callable[..., Driver]
) -> None:
    driver = begin(RAY_DEADLINE_S if message else 120.0)
    driver.wait_steps("called")
    found = driver.find(process)
    assert found is not None
    fault(found)
    assert driver.end() == 1
    assert not message or re.search(f"RayLostError: {message}", driver.log.read_text()), driver.log.read_text()


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        *[("gcs_server", signal.SIGTERM), ("raylet", signal.SIGUSR2), ("opened", signal.SIGQUIT)],
        ("called", signal.SIGKILL),
    ],
)
def test_a_signal_at_any_moment_of_a_start_ends_it_by_the_signals_own_code(
    begin: Callable[..., Driver], number: signal.Signals, phase: str
) -> None:
    driver = begin(deadline_s=120.0)
    if phase in ("opened", "called"):
        driver.wait_steps(phase)
    else:
        driver.wait_until(lambda: driver.find(phase), phase)
    os.kill(driver.run.pid, number)
    # SIGQUIT (Ctrl-backslash) is not waited for: it ends the driver at once, and so does SIGKILL.
    expected = -number if number in (signal.SIGQUIT, signal.SIGKILL) else 128 + number
    assert driver.end() == expected, driver.log.read_text()


SMALL = (
    *("train.num_iterations=1000", "train.samples_per_iteration=16", "train.samples_per_minibatch=16"),
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


@pytest.mark.long
def test_a_run_joins_a_ray_started_by_hand_which_has_none_of_its_processes_after_a_stop(
    ray_address: str, tmp_path: Path
) -> None:
    """By the address of the environment; the jobs of tests/slurm have it as cluster.ray_address."""
    # A run itself waits for the Ray a few seconds only.
    wait_until(lambda: is_listening(ray_address), "Ray to start")
    run = start(*SMALL, "cluster.ray_address=auto", f"hydra.run.dir={tmp_path}", RAY_ADDRESS=ray_address)
    wait_for_iteration(run, tmp_path)
    line = load_metrics(tmp_path / "metrics.jsonl")[-1]
    assert all(line[f"perf/{name}_peak_memory_gb"] > 0.1 for name in ("policy", "servers"))
    run.send_signal(signal.SIGTERM)
    code, printed = wait_end(run)
    assert code == 128 + signal.SIGTERM, printed
    assert load_outcome(tmp_path).state is State.stopped
    wait_until(lambda: not find_marked(tmp_path), "the run's processes to end")
