"""Which calls are repeated, in which order things happen, and when a run gives up."""

import pytest

from megarl.run.fleet import Recovery


class Servers:
    """Counts down: the first `num_losses` looks find a lost server. Everything that happens goes into `events`."""

    def __init__(self, num_losses: int, starts: bool = True):
        self.num_losses, self.starts, self.events = num_losses, starts, []

    def find_lost(self):
        self.events.append("find")
        self.num_losses -= 1
        return {"server 1/2": "it exited with status 137"} if self.num_losses >= 0 else {}

    def restart(self, names):
        self.events.append(f"restart {' '.join(names)}")
        if not self.starts:
            raise RuntimeError("port 5 is taken")


def build_calls(servers: Servers, num_failures: int, max_restarts: int = 3):
    """A recovery with its `ask`, which fails that often, and its `refill`."""

    def ask():
        servers.events.append("ask")
        if servers.events.count("ask") <= num_failures:
            raise RuntimeError("no answer")
        return "answer"

    recovery = Recovery(servers, servers.events.append, max_restarts, lambda: servers.events.append("reconnect"))
    return recovery, ask, lambda: servers.events.append("refill")


LOSS = "server 1/2 was lost: it exited with status 137"
RESTART = ["restart server 1/2", "reconnect"]


def test_a_call_without_failure_asks_for_nothing_else():
    servers = Servers(0)
    recovery, ask, refill = build_calls(servers, 0)
    assert recovery.run(ask, refill) == "answer"
    assert servers.events == ["ask"]


def test_after_a_loss_the_servers_are_filled_before_they_are_asked_again():
    servers = Servers(1)
    recovery, ask, refill = build_calls(servers, 1)
    assert recovery.run(ask, refill) == "answer"
    said = f"{LOSS}; restart 1 of at most 3"
    assert servers.events == ["ask", "find", said, *RESTART, "refill", "ask"]


def test_an_error_that_no_loss_explains_ends_the_run_at_once():
    servers = Servers(0)
    recovery, ask, refill = build_calls(servers, 1)
    with pytest.raises(RuntimeError, match="no answer"):
        recovery.run(ask, refill)
    assert servers.events == ["ask", "find"]


def test_a_server_lost_while_the_weights_come_back_counts_as_another_loss():
    servers = Servers(2)
    recovery, ask, _ = build_calls(servers, 1)

    def refill():
        servers.events.append("refill")
        if servers.events.count("refill") == 1:
            raise RuntimeError("lost again")

    assert recovery.run(ask, refill) == "answer"
    second = f"{LOSS}; restart 2 of at most 3"
    assert servers.events[3:] == [*RESTART, "refill", "find", second, *RESTART, "refill", "ask"]


def test_after_the_last_restart_the_error_is_raised_with_the_loss_and_the_key():
    servers = Servers(9)
    recovery, ask, refill = build_calls(servers, 9, max_restarts=2)
    with pytest.raises(RuntimeError, match="no answer") as caught:
        recovery.run(ask, refill)
    assert caught.value.__notes__ == [f"{LOSS}; rollout.max_server_restarts=2 have been made in a row"]
    assert servers.events.count("refill") == 2


def test_restarts_of_one_call_do_not_count_for_the_next():
    servers = Servers(2)
    recovery, ask, _ = build_calls(servers, 1, max_restarts=1)
    assert recovery.run(ask) == "answer"
    failing = iter([RuntimeError("no answer"), None])

    def ask_once_more():
        if error := next(failing):
            raise error
        return "again"

    assert recovery.run(ask_once_more) == "again"


@pytest.mark.parametrize("servers", [None, Servers(9)])
def test_without_restarts_the_error_is_raised_as_it_is(servers):
    def ask():
        raise RuntimeError("no answer")

    with pytest.raises(RuntimeError, match="no answer"):
        Recovery(servers, pytest.fail, 0 if servers else 3).run(ask)
    assert servers is None or servers.events == []


def test_a_server_that_does_not_start_again_ends_the_run_with_its_reason():
    servers = Servers(1, starts=False)
    recovery, ask, refill = build_calls(servers, 1)
    with pytest.raises(RuntimeError, match="port 5 is taken"):
        recovery.run(ask, refill)


def test_errors_that_are_no_runtime_errors_are_not_looked_into():
    servers = Servers(9)
    recovery, _, refill = build_calls(servers, 0)

    def ask():
        raise ValueError("token id 99")

    with pytest.raises(ValueError, match="token id 99"):
        recovery.run(ask, refill)
    assert servers.events == []
