"""The sorts of rewards: functions of this process, functions in processes of their own, and what is awaited."""

import asyncio
import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.schema.task import ProcessRewardConfig
from megarl.task.process import CallError, FunctionProcess, StartError
from megarl.types import Prompt, Response, RewardFunction, Score


class RewardFailedError(Exception):
    """There is no reward for a response; the message says why, in one line, without what differs between responses."""


class AsyncReward:
    """A reward that is awaited. Many responses are scored at the same time, on one event loop."""

    is_users = False
    """Whether it is the user's own code, which may print, start processes, and use files and the network"""

    async def score(self, prompt: Prompt, response: Response) -> Score:
        """Score a response. Whatever it raises costs the sample."""
        raise NotImplementedError

    async def check(self, prompt: Prompt, response: Response) -> Score:
        """Before anything starts: score a response to one of the data's prompts. Raises ValueError where the reward
        cannot read the prompt."""
        return await self.score(prompt, response)

    def state(self) -> Any:
        """What it keeps from the responses that it has scored, JSON, for a checkpoint; None: nothing. It may be called
        from any thread, while responses are scored. Raises ValueError for what is not JSON."""
        return None

    def load_state(self, state: Any) -> None:
        """Go on from what `state` gave. Called before the first response is scored."""

    def close(self) -> None:
        """End what the reward has started. Called once; it may be called from any thread."""


class DirectReward(AsyncReward):
    """Calls a function of this process, for verifiers that take microseconds."""

    def __init__(self, function: RewardFunction):
        self._function = function

    async def score(self, prompt: Prompt, response: Response) -> Score:
        return self._function(prompt, response)


MOST_CHOSEN = 16
"""Processes that are chosen for a machine of any size"""


def choose_num_workers() -> int:
    """A process for every four cores of this machine, at least one."""
    return min(MOST_CHOSEN, max(1, len(os.sched_getaffinity(0)) // 4))


class ProcessReward(AsyncReward):
    """A function in up to reward.num_workers processes of its own, each started when all before it are busy.

    Derived classes say what it is asked and what its answers mean. A score depends on the prompt and the response
    alone, so that it does not matter which process gives it.
    """

    path: str
    """Of the function that is called once with `options` as keywords and returns the one that answers, as
    package.module:function"""
    key = "reward"
    """The configuration key to name where the function cannot be loaded"""
    given_up: Score | None = None
    """The score of a response whose call ran out of time or memory, or took its process down; None: it failed, as what
    does not end is the function or the pattern"""

    def __init__(self, config: ProcessRewardConfig, **options: Any):
        self._config, self._options = config, options
        self._processes = [
            FunctionProcess(
                self.path,
                options=options,
                timeout_s=config.timeout_s,
                memory_gb=config.memory_gb,
                show_output=self.is_users,
                sealed=not self.is_users,
            )
            for _ in range(config.num_workers or choose_num_workers())
        ]
        self._threads = ThreadPoolExecutor(len(self._processes), thread_name_prefix="reward")
        # The last one used is the next: no more processes run than are needed.
        self._idle: queue.LifoQueue[FunctionProcess] = queue.LifoQueue()
        self._lock, self._is_open = threading.Lock(), False

    def ask(self, prompt: Prompt, response: Response) -> dict[str, Any]:
        """The keywords of the call, JSON. Raises ValueError where the prompt cannot be read."""
        return {"text": response.text}

    def read(self, answer: Any, prompt: Prompt) -> Score:
        """The score that the answer means."""
        raise NotImplementedError

    async def score(self, prompt: Prompt, response: Response) -> Score:
        """Raises RewardFailedError, and ValueError where the prompt cannot be read."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._score, prompt, response)

    def close(self) -> None:
        """End the processes, also in the middle of a call."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()

    def _start(self) -> int:
        """Start the first process; returns how many may run. Raises ConfigError where its function cannot be loaded."""
        try:
            self._processes[0].start()
        except StartError as error:
            raise ConfigError([f"{self.key}: {error}"]) from error
        return len(self._processes)

    def _score(self, prompt: Prompt, response: Response) -> Score:
        with self._lock:
            if not self._is_open:
                for process in reversed(self._processes[: self._start()]):
                    self._idle.put(process)
                self._is_open = True
        question = self.ask(prompt, response)
        process = self._idle.get()
        try:
            return self.read(process.call(question), prompt)
        except StartError as error:
            raise RewardFailedError(f"the reward's process does not start: {error}") from error
        except CallError as error:
            if self.given_up is not None and error.kind in ("time", "memory", "died"):
                return self.given_up
            reasons = {
                "raised": f"raised {error}",
                "time": f"took longer than reward.timeout_s={self._config.timeout_s:g} s",
                "memory": f"needed more memory than reward.memory_gb={self._config.memory_gb:g}",
            }
            raise RewardFailedError(f"the reward {reasons.get(error.kind, f'failed: {error}')}") from error
        finally:
            self._idle.put(process)
