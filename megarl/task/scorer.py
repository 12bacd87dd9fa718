"""From the `reward` group to what scores responses as they come, whatever a verifier does."""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from megarl.config.errors import ConfigError
from megarl.config.schema import task as schema
from megarl.task import reward as rewards
from megarl.task.data import GYM
from megarl.task.process import describe, load_callable, shorten
from megarl.task.reward import AsyncReward, DirectReward, RewardFailedError
from megarl.task.served_rewards import HttpReward, JudgeReward, ScalarModelReward
from megarl.types import FinishReason, Prompt, Response, RewardFunction, Score, check_score

T = TypeVar("T")

ROUNDING = 1e-9
"""Weights such as 0.7, 0.2 and 0.1 do not add up to 1 in binary."""


class Part(NamedTuple):
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
        self.is_users = any(part.reward.is_users for part in parts.values())
        self.sees_group = any(part.reward.sees_group for part in parts.values())

    async def score(self, prompt: Prompt, response: Response) -> Score:
        """Raises RewardFailedError where a part fails, naming the first."""
        return self._add(await self._await([part.reward.score(prompt, response) for part in self._parts.values()]))

    async def score_group(self, prompt: Prompt, responses: Sequence[Response]) -> list[Score | BaseException]:
        found = await self._await([part.reward.score_group(prompt, responses) for part in self._parts.values()])
        rows: list[Score | BaseException] = []
        for row in range(len(responses)):
            try:
                rows.append(self._add([each if isinstance(each, BaseException) else each[row] for each in found]))
            except RewardFailedError as error:
                rows.append(error)
        return rows

    async def check(self, prompt: Prompt, response: Response) -> Score:
        return self._add(await self._await([part.reward.check(prompt, response) for part in self._parts.values()]))

    def state(self) -> Any:
        found = {name: part.reward.state() for name, part in self._parts.items()}
        return None if all(state is None for state in found.values()) else found

    def load_state(self, state: Any) -> None:
        for name, part in self._parts.items():
            if state.get(name) is not None:
                part.reward.load_state(state[name])

    def close(self) -> None:
        for part in self._parts.values():
            part.reward.close()

    async def _await(self, calls: Sequence[Awaitable[T]]) -> list[T | BaseException]:
        return await asyncio.gather(*calls, return_exceptions=True)

    def _add(self, results: Sequence[Score | BaseException]) -> Score:
        scores: dict[str, Score] = {}
        for name, result in zip(self._parts, results, strict=True):
            if isinstance(result, BaseException):
                if not isinstance(result, Exception):
                    raise result
                raised = "" if isinstance(result, RewardFailedError) else f"raised {type(result).__name__}: "
                raise RewardFailedError(f"{name}: {raised}{result}") from result
            if result.failure is not None:
                raise RewardFailedError(f"{name}: {result.failure}")
            scores[name] = result
        reward = sum(self._parts[name].weight * score.reward for name, score in scores.items())
        details: dict[str, float] = {}
        for name, score in scores.items():
            details[name] = score.reward
            details |= {f"{name}/{detail}": value for detail, value in score.details.items()}
        placed = [[self._parts[name].weight * it for it in x.token_rewards] for name, x in scores.items()]
        token_rewards = tuple(map(math.fsum, zip(*filter(None, placed), strict=True)))
        if self._correct_by is not None:
            decides = scores[self._correct_by]
            return Score(reward, decides.correct, details, decides.answer, token_rewards=token_rewards)
        answer = next((score.answer for score in scores.values() if score.answer is not None), None)
        correct = reward >= self._correct_at - ROUNDING
        return Score(reward, correct, details, answer, token_rewards=token_rewards)


def build_reward(config: schema.RewardConfig, key: str = "reward") -> AsyncReward:
    """The reward of this configuration. Raises ConfigError naming what is wrong below `key`, or not installed."""
    if isinstance(config, schema.WeightedRewardConfig):
        parts = {
            each.name: Part(build_reward(each.config, f"reward.parts.{each.name}"), each.weight)
            for each in schema.read_parts(config)
        }
        return WeightedReward(parts, config.correct_by, config.correct_at)
    try:
        reward = KINDS[type(config)](config)
    except ConfigError as error:
        raise ConfigError([re.sub("^reward", key, text) for text in error.problems]) from error
    return reward if isinstance(reward, AsyncReward) else DirectReward(reward)


TOYS = "megarl.examples.toys.rewards:"
KINDS: Mapping[type[schema.RewardConfig], Callable[[Any], AsyncReward | RewardFunction]] = {
    schema.AdditionRewardConfig: lambda config: load_callable(TOYS + "score_addition"),
    schema.CodeRewardConfig: rewards.CodeReward,
    schema.EnvironmentRewardConfig: rewards.EnvironmentReward,
    schema.ExactRewardConfig: lambda config: rewards.score_exact,
    schema.FormatRewardConfig: rewards.FormatReward,
    schema.FunctionRewardConfig: rewards.FunctionReward,
    schema.GroupFunctionRewardConfig: rewards.FunctionReward,
    schema.HttpRewardConfig: HttpReward,
    schema.JudgeRewardConfig: JudgeReward,
    schema.LengthRewardConfig: rewards.LengthReward,
    schema.LetterCountRewardConfig: lambda it: load_callable(TOYS + "LetterCountReward")(it.tolerance, it.falloff),
    schema.MathRewardConfig: rewards.MathReward,
    schema.NumericRewardConfig: rewards.NumericReward,
    schema.ReasoningGymRewardConfig: lambda config: load_callable(GYM + "ReasoningGymReward")(config),
    schema.ScalarModelRewardConfig: ScalarModelReward,
}


def reads_answers(config: schema.RewardConfig) -> bool:
    """Whether this verifier fills Score.answer; a function of the user's may, too."""
    if isinstance(config, schema.WeightedRewardConfig):
        parts = {part.name: part.config for part in schema.read_parts(config)}
        return any(map(reads_answers, [parts[config.correct_by]] if config.correct_by else parts.values()))
    kinds = schema.AdditionRewardConfig, schema.ExactRewardConfig, schema.MathRewardConfig, schema.NumericRewardConfig
    return isinstance(config, kinds)


def check_finite(score: Score) -> None:
    """Raises RewardFailedError naming what of a score is no finite number."""
    numbers = {"reward": score.reward, **{f"details {name!r}": value for name, value in score.details.items()}}
    numbers |= {f"reward at token {n}": value for n, value in enumerate(score.token_rewards)}
    for name, value in numbers.items():
        if not -math.inf < value < math.inf:  # An integer may be too large for a float.
            raise RewardFailedError(f"the {name} is {value}; it must be a finite number")


def _settle(found: Score | BaseException) -> Score:
    """The score; with `failure` for what cost a response its own."""
    try:
        if isinstance(found, Score):
            check_finite(found)
            return found
        raise found
    except Exception as error:
        reason = str(error) if isinstance(error, RewardFailedError) else f"the reward raised {describe(error)}"
        return Score(0.0, False, failure=reason)


class Scorer:
    """Awaits a reward and turns its failures into scores that say so. `score` may be awaited many times at once, on one
    event loop; `close` may be called from any thread."""

    def __init__(self, reward: AsyncReward | RewardFunction):
        self._reward = reward if isinstance(reward, AsyncReward) else DirectReward(reward)
        self.sees_group = self._reward.sees_group
        """Whether responses to one prompt are to be scored together"""

    async def score(self, prompt: Prompt, response: Response) -> Score:
        """The reward's score. Where it raises, hangs, dies or gives no finite number: a score with `failure`, one
        line."""
        try:
            score = await self._reward.score(prompt, response)
        except Exception as error:
            return _settle(error)
        return _settle(score)

    async def score_group(self, prompt: Prompt, responses: Sequence[Response]) -> list[Score]:
        """As `score`, of all responses to a prompt at once."""
        try:
            return [_settle(each) for each in await self._reward.score_group(prompt, responses)]
        except Exception as error:
            return [_settle(error)] * len(responses)

    def check(
        self,
        prompts: Iterable[Prompt],
        wrong: float = 0.0,
        chosen: str = "reward=... with data=...",
        parts: Iterable[str] = (),
    ) -> None:
        """Score an empty response to each prompt, which shows whether the reward can read the data's answers; where the
        user's own function scores, also the answer.

        wrong: reward.wrong, with which the scores must be in [0, 1]. chosen: the reward and the data, for the message.
        parts: what the details must have. Raises ConfigError.
        """

        async def check_all() -> None:
            for prompt in prompts:
                asked = prompt.messages[-1].content if prompt.messages else prompt.text
                for text in ("", prompt.answer) if self._reward.is_users else ("",):
                    # One token: without a text the end of the sequence, sampled at once.
                    response = Response((0,), text, (0.0,), (True,), (0,), FinishReason.stop)
                    try:
                        score = await self._reward.check(prompt, response)
                        check_finite(score)
                        check_score(score.reward, wrong)
                        if missing := [name for name in parts if name not in score.details]:
                            has = f"the reward's details have {', '.join(score.details) or 'none'}"
                            raise ConfigError([f"algo.reward_norm.parts: found {missing[0]}; {has}"])
                    except ConfigError:
                        raise
                    except (ValueError, RewardFailedError) as error:
                        what = f"the reference answer {text[:60]!r} as a response" if text else "an empty response"
                        why = f"{what} to {shorten(asked, 60)!r} cannot be scored: {error}"
                        raise ConfigError([f"{chosen}: {why}"]) from error

        # A thread of its own: the caller's may have an event loop that runs, as in a notebook.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, check_all()).result()

    def state(self) -> Any:
        return self._reward.state()

    def load_state(self, state: Any) -> None:
        self._reward.load_state(state)

    def close(self) -> None:
        """End what the reward has started; what is being scored fails."""
        self._reward.close()


def build_scorer(config: schema.RewardConfig) -> Scorer:
    """The scorer of this configuration. Raises ConfigError as `build_reward`."""
    return Scorer(build_reward(config))
