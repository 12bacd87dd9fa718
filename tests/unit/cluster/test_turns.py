"""Roles that share GPUs: whose call begins when."""

import pytest

from megarl.cluster.workers import Turns


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


def test_roles_on_gpus_of_their_own_begin_at_once() -> None:
    log: list[str] = []
    turns = Turns()
    for name in ("policy", "critic"):
        turns.start(name, lambda name=name: Call(log, name))  # type: ignore[misc]
    assert log == ["policy begins", "critic begins"]


def test_the_failure_of_a_call_is_raised_once_before_the_next_begins() -> None:
    log: list[str] = []
    turns = Turns(one_at_a_time=True)
    turns.start("policy", lambda: Call(log, "update", RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        turns.start("critic", lambda: Call(log, "update of the critic"))
    # What saves the state after the error is not hindered by it.
    turns.start("critic", lambda: Call(log, "save"))
    assert log == ["update begins", "update ends", "save begins"]


def test_a_failure_that_its_caller_has_seen_does_not_hinder_the_save_that_follows() -> None:
    log: list[str] = []
    turns = Turns(one_at_a_time=True)
    values = turns.start("critic", lambda: Call(log, "values", RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        values.result()
    turns.start("policy", lambda: Call(log, "save"))
    assert log == ["values begins", "values ends", "save begins"]


def test_a_signal_in_the_wait_leaves_the_call_to_be_waited_for() -> None:
    log: list[str] = []
    turns = Turns(one_at_a_time=True)
    call = turns.start("policy", lambda: Call(log, "logprobs", KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        turns.start("critic", lambda: Call(log, "values"))
    call.error = None
    del log[:]
    turns.start("critic", lambda: Call(log, "save"))
    assert log == ["logprobs ends", "save begins"]


def test_calls_that_have_ended_are_not_held_however_long_a_role_calls_alone() -> None:
    log: list[str] = []
    turns = Turns(one_at_a_time=True)
    for number in range(5):
        turns.start("critic", lambda number=number: Call(log, f"values {number}")).result()  # type: ignore[misc]
    assert len(turns._running) == 1
