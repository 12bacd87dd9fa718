"""Waiting for several pieces of work at once, and for Ray's calls that a signal has cut short."""

import signal
import threading
import time
from dataclasses import dataclass, field

import pytest

from megarl.cluster import calls
from megarl.interfaces import wait_all
from megarl.run.signals import Stopped


@dataclass
class Work:
    """Ends after `seconds`, well or with `error`."""

    seconds: float
    error: Exception | None = None
    started: float = field(default_factory=time.monotonic)

    def wait(self, timeout_s: float) -> bool:
        left = self.started + self.seconds - time.monotonic()
        time.sleep(min(timeout_s, max(0.0, left)))
        if time.monotonic() - self.started < self.seconds:
            return False
        if self.error:
            raise self.error
        return True


def test_the_first_failure_is_raised_while_another_still_works():
    slow, failing = Work(60.0), Work(0.1, RuntimeError("the policy died"))
    with pytest.raises(RuntimeError, match="the policy died"):
        wait_all([slow, failing])
    assert time.monotonic() - slow.started < 30


def test_all_are_waited_for():
    works = [Work(0.2), Work(0.0), Work(0.1)]
    wait_all(works)
    assert all(time.monotonic() - work.started >= work.seconds for work in works)


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
