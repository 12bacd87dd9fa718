"""Faults of Ray itself and signals while it starts: the driver ends by its own word, and leaves nothing behind."""

import itertools
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
STEPS = ("opened", "called")


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

    def wait_for(self, phase: str) -> None:
        """A step that the driver notes, or the name of a process of Ray."""
        if phase in STEPS:
            self.wait_until(lambda: self.progress.exists() and phase in self.progress.read_text(), phase)
        else:
            self.wait_until(lambda: self.find(phase), phase)

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
    ("phase", "name"),
    [("called", "raylet"), ("called", "gcs_server"), ("raylet", "raylet"), ("called", "ray::RuntimeEnv")],
)
def test_a_process_of_ray_that_stops_or_an_agent_that_ends_ends_the_driver_in_a_start_too(
    start: Callable[..., Driver], phase: str, name: str
) -> None:
    is_agent = name == "ray::RuntimeEnv"
    driver = start(deadline_s=120.0 if is_agent else RAY_DEADLINE_S)
    driver.wait_for(phase)
    process = driver.find(name)
    assert process is not None
    if is_agent:
        process.kill()
    else:
        process.suspend()
    assert driver.end() == 1
    said = driver.log.read_text()
    assert is_agent or re.search(rf"RayLostError: Ray.*{name} {process.pid} stopped", said), said


# Every signal that asks for an end raises the same (tests/unit/run/test_signals.py).
@pytest.mark.parametrize(
    ("phase", "number"),
    [
        *itertools.product(("gcs_server", "raylet", "ray::RuntimeEnv", *STEPS), (signal.SIGTERM, signal.SIGQUIT)),
        *(("raylet", signal.SIGUSR2), ("called", signal.SIGUSR2), ("called", signal.SIGKILL)),
    ],
)
def test_a_signal_at_any_moment_of_a_start_ends_it_by_the_signals_own_code_and_leaves_nothing(
    start: Callable[..., Driver], phase: str, number: signal.Signals
) -> None:
    driver = start(deadline_s=120.0)
    driver.wait_for(phase)
    os.kill(driver.run.pid, number)
    # SIGQUIT (Ctrl-backslash) is not waited for: it ends the driver at once, as SIGKILL does.
    expected = -number if number in (signal.SIGQUIT, signal.SIGKILL) else 128 + number
    assert driver.end() == expected, driver.log.read_text()
