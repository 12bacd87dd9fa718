"""Scores responses as they come, beside generation."""

import math
import threading
from typing import Protocol

from megarl.types import Prompt, Response, RewardFunction, Score


class Scorer(Protocol):
    """Scores one response at a time, many at the same time."""

    async def score(self, prompt: Prompt, response: Response) -> Score:
        """The score; what the verifier does wrong is a Score with a `failure`, and nothing is raised."""
        ...

    def close(self) -> None: ...


class DirectScorer:
    """Calls a reward function in the thread of the event loop, one response after the other."""

    def __init__(self, reward: RewardFunction):
        self._reward = reward
        self._lock = threading.Lock()

    async def score(self, prompt: Prompt, response: Response) -> Score:
        """As `Scorer.score`."""
        try:
            with self._lock:  # A user's function need not be thread-safe.
                score = self._reward(prompt, response)
        except Exception as error:
            return Score(0.0, False, failure=f"the reward raised {type(error).__name__}: {error}")
        if not math.isfinite(score.reward):
            return Score(0.0, False, failure=f"the reward is {score.reward}; it must be a finite number")
        return score

    def close(self) -> None: ...
