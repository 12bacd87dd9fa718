"""The sorts of rewards: functions of this process, functions in processes of their own, and what is awaited."""

import asyncio
import math
import os
import queue
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from megarl.config.errors import ConfigError
from megarl.task.process import (
    CallDiedError,
    CallError,
    CallMemoryError,
    CallRaisedError,
    CallTimeoutError,
    FunctionProcess,
    StartError,
)
from megarl.types import FinishReason, Prompt, Response, RewardFunction, Score


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


MOST_CHOSEN = 16
"""Processes that are chosen for a machine of any size"""


def choose_num_workers() -> int:
    """A process for every four cores of this machine, at least one."""
    return min(MOST_CHOSEN, max(1, len(os.sched_getaffinity(0)) // 4))


class ProcessReward:
    """A verifier in one process, as a function that any thread may call."""

    def __init__(self, verifier: ProcessVerifier):
        self._verifier = verifier
        self._process = FunctionProcess(
            verifier.path,
            options=verifier.options,
            timeout_s=verifier.timeout_s,
            memory_gb=verifier.memory_gb,
            show_output=verifier.is_users,
            sealed=not verifier.is_users,
        )

    def start(self) -> None:
        """Start the process. Raises ConfigError where the verifier cannot be loaded in it."""
        try:
            self._process.start()
        except StartError as error:
            raise ConfigError([f"{self._verifier.key}: {error}"]) from error

    def read_state(self) -> dict[str, Any]:
        """{"state": what the user's function keeps}, empty where it keeps nothing. Raises CallError, StartError."""
        found: dict[str, Any] = self._process.call({})
        return found

    def __call__(self, prompt: Prompt, response: Response) -> Score:
        """Raises RewardFailedError, and ValueError where the prompt cannot be read."""
        verifier = self._verifier
        question = verifier.ask(prompt, response)
        try:
            answer = self._process.call(question)
        except CallRaisedError as error:
            raise RewardFailedError(f"the reward raised {error}") from error
        except StartError as error:
            raise RewardFailedError(f"the reward's process does not start: {error}") from error
        except CallError as error:
            is_responses_fault = isinstance(error, CallTimeoutError | CallMemoryError | CallDiedError)
            score = verifier.give_up() if is_responses_fault else None
            if score is None:
                raise RewardFailedError(self._explain(error)) from error
            return score
        return verifier.read(answer, prompt)

    def _explain(self, error: CallError) -> str:
        if isinstance(error, CallTimeoutError):
            return f"the reward took longer than reward.timeout_s={self._verifier.timeout_s:g} s"
        if isinstance(error, CallMemoryError):
            return f"the reward needed more memory than reward.memory_gb={self._verifier.memory_gb:g}"
        return f"the reward failed: {error}"

    def restart(self) -> None:
        """End the process; the next call starts it again."""
        self._process.stop()

    def close(self) -> None:
        """End the process; later calls fail."""
        self._process.close()


class PooledReward(AsyncReward):
    """A verifier in up to `num_workers` processes, each started when all before it are busy.

    A score depends on the prompt and the response alone, so that it does not matter which process gives it; or the
    user's function keeps a state, and is then called in one process.
    """

    def __init__(self, verifier: ProcessVerifier, num_workers: int | None):
        """num_workers: None chooses by the cores of this machine."""
        self._verifier, self._num_workers = verifier, num_workers
        self._lock, self._is_open = threading.Lock(), False
        self._keeps_state = False
        self._rewards = [ProcessReward(verifier) for _ in range(num_workers or choose_num_workers())]
        self._threads = ThreadPoolExecutor(len(self._rewards), thread_name_prefix="reward")
        # The last one used is the next: no more processes run than are needed.
        self._idle: queue.LifoQueue[ProcessReward] = queue.LifoQueue()

    def _open(self) -> None:
        """Before the first call: find out whether the user's function keeps a state. Raises ConfigError."""
        with self._lock:
            if self._is_open:
                return
            self._rewards[0].start()
            if self._verifier.is_users:
                try:
                    self._keeps_state = "state" in self._rewards[0].read_state()
                except CallError as error:
                    raise ConfigError([f"{self._verifier.key}: {error}"]) from error
            if self._keeps_state and (self._num_workers or 1) > 1:
                raise ConfigError(
                    [
                        f"reward.num_workers: {self._num_workers} found; the reward has state_dict and load_state_dict,"
                        " and each process would keep a state of its own: must be 1 or null"
                    ]
                )
            for reward in self._rewards[:1] if self._keeps_state else reversed(self._rewards):
                self._idle.put(reward)
            self._is_open = True

    def state(self) -> Any:
        """Of a function that keeps one; where its process has ended by a failure, it goes on from the last one."""
        if self._keeps_state:
            try:
                self._verifier.options["state"] = self._rewards[0].read_state()["state"]
            except CallRaisedError as error:
                raise ValueError(str(error)) from error
            except (CallError, StartError) as error:
                warnings.warn(
                    f"{self._verifier.key}: the reward's state could not be read ({error}); a checkpoint has the last"
                    " one that could",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return self._verifier.options.get("state")

    def load_state(self, state: Any) -> None:
        """A process that has started goes on from this state by being started again."""
        self._verifier.options["state"] = state
        for reward in self._rewards:
            reward.restart()

    async def score(self, prompt: Prompt, response: Response) -> Score:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._score, prompt, response)

    async def check(self, prompt: Prompt, empty: Response) -> Score:
        score = await self.score(prompt, empty)
        if self._verifier.is_users and find_not_finite(score) is None:
            # What a function does with a text is otherwise seen only after the first rollout.
            stated = Response((0,), prompt.answer, (0.0,), (True,), (0,), FinishReason.stop)
            try:
                if bad := find_not_finite(await self.score(prompt, stated)):
                    raise RewardFailedError(bad)
            except RewardFailedError as error:
                raise AnswerFailedError(f"{error}, with the response {prompt.answer[:60]!r}") from error
        return score

    def list_notes(self) -> list[str]:
        # Only a user's function says more than a verifier asks for.
        return list(getattr(self._verifier, "notes", ()))

    def _score(self, prompt: Prompt, response: Response) -> Score:
        self._open()
        reward = self._idle.get()
        try:
            return reward(prompt, response)
        finally:
            self._idle.put(reward)

    def close(self) -> None:
        """End the processes, also in the middle of a call."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for reward in self._rewards:
            reward.close()
