"""Who is started when."""

from dataclasses import dataclass

import pytest

from megarl.run.job import wait_started


@dataclass
class Starting:
    """A `Pending` that ends at the second look, and notes that."""

    name: str
    events: list[str]
    num_looks: int = 0

    def wait(self, timeout_s: float) -> bool:
        self.num_looks += 1
        if self.num_looks == 2:
            self.events.append(f"{self.name} ready")
        return self.num_looks >= 2

    def result(self) -> list[str]:
        return []


class Failing(Starting):
    def wait(self, timeout_s: float) -> bool:
        raise RuntimeError(f"{self.name} failed")


def test_servers_that_share_gpus_start_once_every_role_is_ready_and_others_beside_them() -> None:
    orders = {}
    for roles_first in (True, False):
        events: list[str] = []

        def start_servers(events: list[str] = events) -> Starting:
            events.append("servers begin")
            return Starting("servers", events)

        wait_started([Starting("policy", events), Starting("critic", events)], start_servers, roles_first=roles_first)
        orders[roles_first] = events
    assert orders[True] == ["policy ready", "critic ready", "servers begin", "servers ready"]
    assert orders[False] == ["servers begin", "servers ready", "policy ready", "critic ready"]


def test_servers_are_not_started_where_a_role_has_failed() -> None:
    def start_servers() -> Starting:
        raise AssertionError("started")

    with pytest.raises(RuntimeError, match="policy failed"):
        wait_started([Failing("policy", [])], start_servers, roles_first=True)
