"""A weighted sum of rewards."""

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.reward.interface import AsyncReward, RewardFailedError
from megarl.types import Prompt, Response, Score

ROUNDING = 1e-9
"""Weights such as 0.7, 0.2 and 0.1 do not add up to 1 in binary."""


@dataclass(frozen=True)
class Part:
    """One reward of the sum."""

    reward: AsyncReward
    weight: float


class WeightedReward(AsyncReward):
    """reward = sum over the parts of weight * the part's reward; all parts are awaited at the same time.

    Correct where the part `correct_by` says so, else from `correct_at` on. details: of a part NAME its reward as NAME
    and its own details as NAME/DETAIL. The answer is that of `correct_by`, else of the first part that reads one.
    """

    def __init__(self, parts: Mapping[str, Part], correct_by: str | None, correct_at: float):
        self._parts = dict(parts)
        self._correct_by, self._correct_at = correct_by, correct_at

    async def score(self, prompt: Prompt, response: Response) -> Score:
        """Raises RewardFailedError where a part fails, naming it."""
        calls = [part.reward.score(prompt, response) for part in self._parts.values()]
        return self._add([score for score in await _gather(calls, self._parts) if score is not None])

    async def check(self, prompt: Prompt, empty: Response) -> Score | None:
        """None where a part cannot be asked yet."""
        scores = await _gather([part.reward.check(prompt, empty) for part in self._parts.values()], self._parts)
        known = [score for score in scores if score is not None]
        return self._add(known) if len(known) == len(scores) else None

    def state(self) -> Any:
        found = {name: part.reward.state() for name, part in self._parts.items()}
        return None if all(state is None for state in found.values()) else found

    def load_state(self, state: Any) -> None:
        for name, part in self._parts.items():
            if state.get(name) is not None:
                part.reward.load_state(state[name])

    def list_notes(self) -> list[str]:
        return [f"{name}: {note}" for name, part in self._parts.items() for note in part.reward.list_notes()]

    def close(self) -> None:
        for part in self._parts.values():
            part.reward.close()

    def _add(self, scores: Sequence[Score]) -> Score:
        by_name = dict(zip(self._parts, scores, strict=True))
        reward = sum(self._parts[name].weight * score.reward for name, score in by_name.items())
        details: dict[str, float] = {}
        for name, score in by_name.items():
            details[name] = score.reward
            details |= {f"{name}/{detail}": value for detail, value in score.details.items()}
        if self._correct_by is not None:
            decides = by_name[self._correct_by]
            return Score(reward, decides.correct, details, decides.answer)
        answers = [score.answer for score in scores if score.answer is not None]
        return Score(reward, reward >= self._correct_at - ROUNDING, details, answers[0] if answers else None)


async def _gather(calls: Sequence[Awaitable[Score | None]], names: Iterable[str]) -> list[Score | None]:
    """The scores of all parts. Raises RewardFailedError for the first of them, in their order, that failed."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    scores: list[Score | None] = []
    for name, result in zip(names, results, strict=True):
        if isinstance(result, RewardFailedError):
            raise type(result)(f"{name}: {result}") from result
        if isinstance(result, Exception):
            raise RewardFailedError(f"{name}: raised {type(result).__name__}: {result}") from result
        if isinstance(result, BaseException):
            raise result
        if result is not None and result.failure is not None:
            raise RewardFailedError(f"{name}: {result.failure}")
        scores.append(result)
    return scores
