"""What a run does where generation servers are lost: say so, start them again, bring them the weights, try again."""

from collections.abc import Callable
from typing import TypeVar

from megarl.interfaces import DeadlineError, RolloutServers
from megarl.rollout.calls import wait_left_over

T = TypeVar("T")

LEFT_OVER_DEADLINE_S = 60.0
"""More than the connects and closing calls of a thread that was given up may take."""


class Recovery:
    """Repeats calls to the servers that failed because servers were lost, after those were started again."""

    def __init__(
        self,
        servers: RolloutServers | None,
        say: Callable[[str], None],
        max_restarts: int,
        reconnect: Callable[[], None] = lambda: None,
    ):
        """servers: None where nothing can start them again. say: is told of each loss. max_restarts: in a row, for one
        call of `run`. reconnect: called after each restart.
        """
        self._servers = servers
        self._say = say
        self._reconnect = reconnect
        self._max_restarts = max_restarts

    def run(self, ask: Callable[[], T], refill: Callable[[], object] = lambda: None) -> T:
        """What `ask` gives. `refill` brings the servers the current weights; not needed where `ask` itself does.

        After a restart `refill` comes first, on all servers, so that none generates with its checkpoint's weights.
        Raises what `ask` or `refill` raises where no server was lost, and after the last restart.
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
        """Whether `error` came of lost servers and they are up again."""
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
        self._servers.restart(lost)
        self._reconnect()
        return True
