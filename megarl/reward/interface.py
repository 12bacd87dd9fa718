"""The sorts of rewards: functions of this process, functions in processes of their own, and what is awaited."""

import math
from typing import Any, Protocol

from megarl.types import Prompt, Response, RewardFunction, Score


class RewardFailedError(Exception):
    """There is no reward for a response; the message says why, in one line, without what differs between responses."""


class AnswerFailedError(RewardFailedError):
    """There is none for the reference answer, given as a response."""


def find_not_finite(score: Score) -> str | None:
    """What of a score is no finite number, as a sentence."""
    numbers = {"reward": score.reward, **{f"details {name!r}": value for name, value in score.details.items()}}
    # An integer may be too large for a float.
    bad = next((name for name, value in numbers.items() if not -math.inf < value < math.inf), None)
    return None if bad is None else f"the {bad} is {numbers[bad]}; it must be a finite number"


class AsyncReward:
    """A reward that is awaited. Many responses are scored at the same time, on one event loop."""

    async def score(self, prompt: Prompt, response: Response) -> Score:
        """Score a response. Whatever it raises costs the sample."""
        raise NotImplementedError

    async def check(self, prompt: Prompt, empty: Response) -> Score | None:
        """Before anything starts: score an empty response to one of the data's prompts, None where that needs what does
        not run yet. Raises ValueError where the reward cannot read the prompt."""
        return await self.score(prompt, empty)

    def state(self) -> Any:
        """What it keeps from the responses that it has scored, JSON, for a checkpoint; None: nothing. It may be called
        from any thread, while responses are scored. Raises ValueError for what is not JSON."""
        return None

    def load_state(self, state: Any) -> None:
        """Go on from what `state` gave. Called before the first response is scored."""

    def list_notes(self) -> list[str]:
        """What of the scores so far was not used, for the reader of a log."""
        return []

    def close(self) -> None:
        """End what the reward has started. Called once; it may be called from any thread."""


class DirectReward(AsyncReward):
    """Calls a function of this process, for verifiers that take microseconds."""

    def __init__(self, function: RewardFunction):
        self._function = function

    async def score(self, prompt: Prompt, response: Response) -> Score:
        return self._function(prompt, response)


class ProcessVerifier(Protocol):
    """A verifier whose work is done by a function in a process of its own; the rest is done here."""

    path: str
    """Of the function that is called once with `options` as keywords and returns the one that answers, as
    package.module:function"""
    options: dict[str, Any]
    key: str
    """The configuration key to name where the function cannot be loaded"""
    timeout_s: float
    memory_gb: float
    is_users: bool
    """Whether it is the user's own code, which may print, start processes, and use files and the network"""

    def ask(self, prompt: Prompt, response: Response) -> dict[str, Any]:
        """The keywords of the call, JSON. Raises ValueError where the prompt cannot be read."""
        ...

    def read(self, answer: Any, prompt: Prompt) -> Score:
        """The score that the answer means."""
        ...

    def give_up(self) -> Score | None:
        """The score of a response whose call ran out of time or memory, or took its process down; None: it failed."""
        ...
