"""Which calls are repeated where servers are lost, in which order things happen, and when a run gives up."""

import pytest

from megarl.run.fleet import Recovery

LOSS = "server 1/2 was lost: it exited with status 137"
RESTART = ["restart server 1/2", "reconnect"]


class Servers:
    """Counts down: the first `num_losses` looks find a lost server. Everything that happens goes into `events`."""

    def __init__(self, num_losses: int, num_failures: int, starts: bool = True):
        self.num_losses, self.num_failures, self.starts, self.events = num_losses, num_failures, starts, []

    def find_lost(self):
        self.events.append("find")
        self.num_losses -= 1
        return {"server 1/2": "it exited with status 137"} if self.num_losses >= 0 else {}

    def restart(self, names):
        self.events.append(f"restart {' '.join(names)}")
        if not self.starts:
            raise RuntimeError("port 5 is taken")

    def ask(self):
        """Fails `num_failures` times."""
        self.events.append("ask")
        self.num_failures -= 1
        if self.num_failures >= 0:
            raise RuntimeError("no answer")
        return "answer"

    def refill(self):
        self.events.append("refill")

    def recover(self, max_restarts: int = 3) -> Recovery:
        return Recovery(self, self.events.append, max_restarts, lambda: self.events.append("reconnect"))


@pytest.mark.parametrize(
    ("num_losses", "num_failures", "events"),
    [
        (0, 0, ["ask"]),
        # The servers are filled before they are asked again.
        (1, 1, ["ask", "find", f"{LOSS}; restart 1 of at most 3", *RESTART, "refill", "ask"]),
    ],
)
def test_a_call_is_repeated_after_a_loss_and_only_then(num_losses, num_failures, events):
    servers = Servers(num_losses, num_failures)
    assert servers.recover().run(servers.ask, servers.refill) == "answer"
    assert servers.events == events


@pytest.mark.parametrize(
    ("num_losses", "max_restarts", "starts", "message", "num_refills", "notes"),
    [
        (0, 3, True, "no answer", 0, []),  # an error that no loss explains
        (9, 2, True, "no answer", 2, [f"{LOSS}; rollout.max_server_restarts=2 have been made in a row"]),
        (9, 0, True, "no answer", 0, []),
        (1, 3, False, "port 5 is taken", 0, []),
    ],
)
def test_what_ends_a_run(num_losses, max_restarts, starts, message, num_refills, notes):
    servers = Servers(num_losses, 9, starts)
    with pytest.raises(RuntimeError, match=message) as caught:
        servers.recover(max_restarts).run(servers.ask, servers.refill)
    assert getattr(caught.value, "__notes__", []) == notes
    assert servers.events.count("refill") == num_refills


def test_a_server_lost_while_the_weights_come_back_counts_as_another_loss():
    servers = Servers(2, 1)

    def refill():
        servers.refill()
        if servers.events.count("refill") == 1:
            raise RuntimeError("lost again")

    assert servers.recover().run(servers.ask, refill) == "answer"
    second = f"{LOSS}; restart 2 of at most 3"
    assert servers.events[3:] == [*RESTART, "refill", "find", second, *RESTART, "refill", "ask"]


def test_restarts_of_one_call_do_not_count_for_the_next_and_other_errors_are_not_looked_into():
    servers = Servers(2, 1)
    recovery = servers.recover(1)
    assert recovery.run(servers.ask) == "answer"
    servers.num_failures = 1
    assert recovery.run(servers.ask) == "answer"
    del servers.events[:]

    def fail():
        raise ValueError("token id 99")

    with pytest.raises(ValueError, match="token id 99"):
        recovery.run(fail)
    assert servers.events == []
