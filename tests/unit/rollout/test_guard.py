"""The process that owns a server: real processes, a plain Python program in SGLang's place."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megarl import signals

# A server with a child in a session of its own, which ignores SIGTERM and holds a file and a semaphore in
# shared memory; nothing cleans up after it, as after an SGLang scheduler that was killed.
CHILD = """
import _multiprocessing, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
held = open(sys.argv[1], "w")
name = "/" + sys.argv[1].rpartition("/")[2]
semaphore = _multiprocessing.SemLock(1, 1, 1, name, False)
print("up", flush=True)
time.sleep(100)
"""
PROGRAM = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {CHILD!r}, sys.argv[1]], start_new_session=True)
time.sleep(100)
"""


@pytest.fixture
def held():
    """The file, and the name under which glibc keeps the program's semaphore."""
    path = Path(f"/dev/shm/megarl-test-{os.getpid()}")
    files = [path, path.with_name(f"sem.{path.name}")]
    yield files
    for file in files:
        file.unlink(missing_ok=True)


def start(scratch: Path, *command: str) -> subprocess.Popen:
    scratch.mkdir()
    words = [sys.executable, "-S", "-I", signals.__file__, str(scratch), *command]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def wait_gone(processes: list[psutil.Process]) -> None:
    gone, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []
    assert len(gone) == len(processes)


@pytest.mark.parametrize("end", ["close", "terminate"])
def test_nothing_outlives_the_owners_end(tmp_path, held, end):
    process = start(tmp_path / "scratch", sys.executable, "-c", PROGRAM, str(held[0]))
    assert process.stdout.readline() == b"up\n"
    processes = psutil.Process(process.pid).children(recursive=True)
    assert len(processes) == 2
    assert [file.exists() for file in held] == [True, True]
    # Ctrl-C, which the terminal sends to all, does not end it.
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.stdin.close() if end == "close" else process.terminate()
    wait_gone(processes)
    assert process.wait(10) == 0
    assert not any(file.exists() for file in (*held, tmp_path / "scratch"))


def test_a_killed_owner_takes_its_server_along(tmp_path, held):
    words = [sys.executable, "-S", "-I", signals.__file__, str(tmp_path / "s"), sys.executable, "-c", PROGRAM]
    owner = f"""
import subprocess, time
subprocess.Popen({[*words, str(held[0])]!r}, stdin=subprocess.PIPE, start_new_session=True)
time.sleep(100)
"""
    process = subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"up\n"
    processes = psutil.Process(process.pid).children(recursive=True)
    assert len(processes) == 3
    process.kill()
    process.wait()
    wait_gone(processes)
    assert not any(file.exists() for file in held)


def test_a_killed_guard_takes_the_servers_first_process_along(tmp_path):
    process = start(tmp_path / "s", sys.executable, "-c", "print('up', flush=True); import time; time.sleep(100)")
    assert process.stdout.readline() == b"up\n"
    (server,) = psutil.Process(process.pid).children()
    process.kill()
    wait_gone([server])
    process.wait()


@pytest.mark.parametrize(("code", "status"), [("exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_the_exit_status_is_the_servers(tmp_path, code, status):
    assert start(tmp_path / "s", sys.executable, "-c", code).wait(10) == status
