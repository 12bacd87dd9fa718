"""Faults of Ray itself and signals while it starts: the driver ends by its own word, and leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

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
def start(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def begin(deadline_s: float = RAY_DEADLINE_S) -> Driver:
        drivers.append(Driver(tmp_path, deadline_s))
        return drivers[-1]

    yield begin
    for driver in drivers:
        if driver.run.poll() is None:
            driver.run.kill()
        for process in driver.seen:
            if process.is_running():
                process.kill()


@pytest.mark.parametrize(
    ("process", "fault", "message"),
    [
        (
            "raylet",
            psutil.Process.suspend,
            LATE,
        ),
        ("raylet", psutil.Process.kill, r"Ray's process raylet has died: store"),
        ("ray::RuntimeEnv", psutil.Process.kill, ""),
    ],
)
def test_a_process_of_ray_that_stops_or_dies_ends_the_run_with_what_was_asked_of_it_and_leaves_nothing(
    process: str, fault: Callable[[psutil.Process], None], message: str, start: Callable[..., Driver]
) -> None:
    driver = start(RAY_DEADLINE_S if message else 120.0)
    driver.wait_steps("called")
    found = driver.find(process)
    assert found is not None
    fault(found)
    assert driver.end() == 1
    assert not message or re.search(f"RayLostError: {message}", driver.log.read_text()), driver.log.read_text()


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        *[("gcs_server", signal.SIGTERM), ("gcs_server", signal.SIGQUIT), ("raylet", signal.SIGUSR2)],
        *[("ray::RuntimeEnv", signal.SIGTERM), ("opened", signal.SIGUSR2), ("called", signal.SIGTERM)],
        *[("called", signal.SIGQUIT), ("called", signal.SIGKILL)],
    ],
)
def test_a_signal_at_any_moment_of_a_start_ends_it_by_the_signals_own_code(
    start: Callable[..., Driver], number: signal.Signals, phase: str
) -> None:
    driver = start(deadline_s=120.0)
    if phase in ("opened", "called"):
        driver.wait_steps(phase)
    else:
        driver.wait_until(lambda: driver.find(phase), phase)
    os.kill(driver.run.pid, number)
    # SIGQUIT (Ctrl-backslash) is not waited for: it ends the driver at once, and so does SIGKILL.
    expected = -number if number in (signal.SIGQUIT, signal.SIGKILL) else 128 + number
    assert driver.end() == expected, driver.log.read_text()
