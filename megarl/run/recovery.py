"""The generation servers as the loop has them: with the current weights, and restarted where they were lost."""

from collections.abc import Callable
from typing import TypeVar

from megarl.interfaces import DeadlineError, RolloutServers, WeightSync
from megarl.rollout.client import wait_left_over
from megarl.rollout.offload import ServerOffloader
from megarl.types import Metrics

T = TypeVar("T")

LEFT_OVER_DEADLINE_S = 60.0
"""How long to wait for abandoned calls, more than their connects and clean-up calls may take."""


class Recovery:
    """Repeats calls that failed because servers were lost, after restarting those servers."""

    def __init__(
        self,
        servers: RolloutServers | None,
        say: Callable[[str], None],
        max_restarts: int,
        reconnect: Callable[[], None] = lambda: None,
        *,
        restarts_all: bool = False,
    ):
        """servers: None where they cannot be restarted. say: called with a message for each loss. max_restarts: in a
        row, for one call of `run`. reconnect: called after each restart. restarts_all: where one is lost, the others
        are restarted too.
        """
        self._servers = servers
        self._say = say
        self._reconnect = reconnect
        self._max_restarts = max_restarts
        self._restarts_all = restarts_all

    def run(self, ask: Callable[[], T], refill: Callable[[], object] = lambda: None) -> T:
        """The result of `ask`, repeated where servers were lost.

        refill: sends the current weights to all servers after a restart, before `ask`, so that none generates with
        its checkpoint's weights; not needed where `ask` itself does. Raises what `ask` or `refill` raises where no
        server was lost, and after the last restart.
        """
        num_restarts = 0
        while True:
            try:
                if num_restarts:
                    refill()
                return ask()
            except RuntimeError as error:
                if not self._restore(error, num_restarts):
                    raise
                num_restarts += 1

    def _restore(self, error: RuntimeError, num_restarts: int) -> bool:
        """Whether lost servers caused `error` and have been restarted."""
        if self._servers is None or self._max_restarts == 0:
            return False
        try:
            wait_left_over(LEFT_OVER_DEADLINE_S)
        except DeadlineError as late:
            error.add_note(str(late))
            return False
        lost = self._servers.find_lost()
        if not lost:
            return False
        losses = "; ".join(f"{name} was lost: {reason}" for name, reason in lost.items())
        if num_restarts == self._max_restarts:
            error.add_note(f"{losses}; rollout.max_server_restarts={self._max_restarts} have been made in a row")
            return False
        self._say(f"{losses}; restart {num_restarts + 1} of at most {self._max_restarts}")
        self._servers.restart(self._servers.names if self._restarts_all else lost)
        self._reconnect()
        return True


class Fleet:
    """The generation servers of a run, with the trainer's weights."""

    def __init__(
        self,
        sync: WeightSync,
        offloader: ServerOffloader,
        servers: RolloutServers | None,
        max_restarts: int,
        say: Callable[[str], None],
    ):
        """servers, max_restarts, say: as in `Recovery`."""
        self.version = 0
        """Of the weights that the servers have"""
        self.forget_groups: Callable[[], None] = lambda: None
        """Breaks off what is under way, after servers were restarted"""
        self._sync, self._offloader = sync, offloader
        restarts_all = offloader.offload is not None
        self._recovery = Recovery(servers, say, max_restarts, self._reconnect, restarts_all=restarts_all)

    def publish(self, version: int) -> Metrics:
        """Send the policy's weights to the servers as `version`, verified."""
        metrics = self._recovery.run(lambda: self._sync.publish(version))
        self.version = version
        return metrics

    def ask(self, ask: Callable[[], T]) -> T:
        """The result of `ask`, repeated where servers were lost, once they run again with the current weights.

        Servers that have given memory back take it again first, and get the current weights.
        """

        def ask_ready() -> T:
            if self._offloader.has_released:
                self._sync.publish(self.version)
            return ask()

        return self._recovery.run(ask_ready, lambda: self._sync.publish(self.version))

    def _reconnect(self) -> None:
        """Discard all state about the servers, after some were restarted."""
        self._sync.reconnect()
        self._offloader.forget()
        self.forget_groups()
