"""What begins groups for `GroupScheduler`: the test says when each of them is complete."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from megarl.rollout.rollout_file import Group
from megarl.types import FinishReason, Prompt, Response, Sample, Score

DEADLINE_S = 30.0


def make_group(prompt: Prompt, versions: Sequence[int] = (0,), rewards: Sequence[float] = (0.0, 1.0)) -> Group:
    """Samples with one token of each of these versions; their ids and text tell the prompt."""
    tokens = (prompt.token_ids[0],) * len(versions)
    response = Response(tokens, prompt.id, (-0.5,) * len(tokens), (True,) * len(tokens), versions, FinishReason.stop)
    return tuple(Sample(prompt, response, Score(reward, reward > 0.5), 0) for reward in rewards)


@dataclass
class UnderWay:
    prompt: Prompt
    first_version: int
    future: "Future[Group]"


@dataclass
class GroupMaker:
    """`start` of a scheduler. A group's first token is of the version at its begin and its last one of that at its end.

    rewards: those of a group, by its number.
    """

    rewards: Callable[[int], Sequence[float]] = lambda _number: (0.0, 1.0)
    version: int = 0
    under_way: dict[int, UnderWay] = field(default_factory=dict)
    begun: list[int] = field(default_factory=list)
    """Numbers, as often as they were begun"""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self, prompt: Prompt, key: str) -> "Future[Group]":
        number, future = int(key.removeprefix("group-")), Future[Group]()
        with self.changed:
            self.under_way[number] = UnderWay(prompt, self.version, future)
            self.begun.append(number)
            self.changed.notify_all()
        future.add_done_callback(lambda _future: self._forget(number, future))
        return future

    def complete(self, number: int) -> None:
        group = self.under_way[number]
        versions = (group.first_version, self.version)
        group.future.set_result(make_group(group.prompt, versions, self.rewards(number)))

    def fail(self, number: int, error: BaseException) -> None:
        self.under_way[number].future.set_exception(error)

    def wait(self, num_under_way: int) -> None:
        """Until exactly so many groups are under way."""
        with self.changed:
            found = self.changed.wait_for(lambda: len(self.under_way) == num_under_way, DEADLINE_S)
            assert found, f"{len(self.under_way)} groups are under way; {num_under_way} were expected"

    def _forget(self, number: int, future: "Future[Group]") -> None:
        with self.changed:
            if (group := self.under_way.get(number)) is not None and group.future is future:
                del self.under_way[number]
            self.changed.notify_all()
