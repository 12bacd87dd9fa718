"""Waiting for calls that a signal has cut short, and turns; what killed drivers leave."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megarl.cluster import calls
from megarl.cluster.actors import Turns
from megarl.cluster.opened import remove_left_over
from megarl.signals import Stopped


def test_a_call_that_a_signal_cuts_short_as_it_begins_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends the process where a call goes on after ray.shutdown."""
    stock, answer = threading.Thread.start, threading.Event()

    def start(thread: threading.Thread) -> None:
        stock(thread)
        raise Stopped(signal.SIGUSR2)

    calls.begin(60.0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(Stopped):
            calls.ask("start of the worker", answer.wait)
    assert not calls.settle(0.0)
    answer.set()
    assert calls.settle(30.0)


class Call:
    """A `Pending` that notes when it begins and when it has ended, which it has once somebody gives it time."""

    def __init__(self, log: list[str], name: str, error: BaseException | None = None):
        self.log, self.name, self.error = log, name, error
        log.append(f"{name} begins")

    def wait(self, timeout_s: float) -> bool:
        if f"{self.name} ends" not in self.log:
            if timeout_s == 0.0:
                return False
            self.log.append(f"{self.name} ends")
        if self.error is not None:
            raise self.error
        return True

    def result(self) -> None:
        self.wait(1.0)


def test_a_call_begins_once_the_calls_of_other_roles_have_ended_and_the_servers_have_given_memory_back() -> None:
    log: list[str] = []
    turns = Turns(one_at_a_time=True)
    turns.free_servers = lambda: log.append("free")
    turns.start("policy", lambda: Call(log, "logprobs"))
    turns.start("policy", lambda: Call(log, "kl"))
    turns.start("critic", lambda: Call(log, "values"))
    turns.start("critic", lambda: Call(log, "update"))
    first = ["free", "logprobs begins", "free", "kl begins"]
    assert log == [*first, "free", "logprobs ends", "kl ends", "values begins", "free", "update begins"]
    del log[:]
    apart = Turns()  # on GPUs of their own
    for name in ("policy", "critic"):
        apart.start(name, lambda name=name: Call(log, name))  # type: ignore[misc]
    assert log == ["policy begins", "critic begins"]


def test_the_failure_of_a_call_is_raised_once_before_the_next_begins_and_after_a_signal_it_is_waited_for() -> None:
    log: list[str] = []
    turns = Turns(one_at_a_time=True)
    turns.start("policy", lambda: Call(log, "update", RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        turns.start("critic", lambda: Call(log, "update of the critic"))
    # What saves the state after the error is not hindered by it.
    turns.start("critic", lambda: Call(log, "save"))
    values = turns.start("critic", lambda: Call(log, "values", RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        values.result()  # Its caller has seen it.
    call = turns.start("policy", lambda: Call(log, "logprobs", KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        turns.start("critic", lambda: Call(log, "more values"))
    call.error = None
    turns.start("critic", lambda: Call(log, "another save"))
    assert len(turns._running) == 1  # Calls that have ended are not held.
    first = ["update begins", "update ends", "save begins", "values begins", "values ends"]
    assert log == [*first, "save ends", "logprobs begins", "logprobs ends", "another save begins"]


def test_folders_of_processes_that_are_gone_are_removed_and_no_others(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone = [f"megarl-{ended.pid}-abc_1", f"megarl-sync-{ended.pid}-x2", f"megarl-sglang-{ended.pid}-z"]
    own = [f"megarl-{os.getpid()}-abc", f"megarl-sync-{os.getpid()}-y"]
    kept = [*own, "megarl-sglang-abc", "megarl-sync-abc", "other"]
    for name in (*gone, *kept):
        (tmp_path / name / "below").mkdir(parents=True)
    remove_left_over([tmp_path])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
