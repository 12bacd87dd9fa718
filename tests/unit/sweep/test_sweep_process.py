"""A run's own process: its exit, its last words, and the signals that end it."""

import os
import signal
import sys
import threading
import time

import pytest

from megarl.signals import Stopped
from megarl.sweep import explain_exit, run_process

SAVING = """
import signal, sys, time
def save(number, frame):
    print("saved", signal.Signals(number).name, flush=True)
    sys.exit(128 + number)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, save)
print("ready", flush=True)
time.sleep(60)
"""


def test_what_a_run_prints_is_in_its_log_and_its_code_comes_back(tmp_path):
    log = tmp_path / "run" / "output.log"
    assert run_process(["sh", "-c", "echo one; echo two >&2; exit 3"], log, 5) == 3
    assert run_process(["sh", "-c", "echo three; kill -9 $$"], log, 5) == -9
    assert log.read_text() == "one\ntwo\nthree\n"


def test_last_words_are_not_hydras(tmp_path):
    text = "RuntimeError: out of memory\n\nSet the environment variable HYDRA_FULL_ERROR=1 for ...\n"
    (tmp_path / "log").write_text(text)
    assert explain_exit(1, tmp_path / "log") == "exit code 1: RuntimeError: out of memory"


@pytest.mark.parametrize(
    ("command", "deadline_s", "said"),
    [
        ([sys.executable, "-c", SAVING], 30, "ready\nsaved SIGTERM\n"),
        # One that heeds no signal is killed after the deadline.
        (["sh", "-c", "trap '' TERM; echo ready; sleep 60 & wait; sleep 60"], 0.2, "ready\n"),
    ],
)
def test_a_signal_ends_the_run_first_which_saves(tmp_path, command, deadline_s, said):
    log = tmp_path / "output.log"
    threading.Thread(target=signal_when_ready, args=(log,)).start()
    with pytest.raises(Stopped, match="SIGTERM"):
        run_process(command, log, deadline_s)
    assert log.read_text() == said


def signal_when_ready(log):
    end = time.monotonic() + 30
    while time.monotonic() < end and not (log.exists() and "ready" in log.read_text()):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
