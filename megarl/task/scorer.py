"""From the `reward` group to what scores responses as they come, whatever a verifier does."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from megarl.algo.rewards import check_score
from megarl.config.errors import ConfigError
from megarl.config.reward_parts import RewardPart, read_parts
from megarl.config.schema.task import (
    AdditionRewardConfig,
    CodeRewardConfig,
    EnvironmentRewardConfig,
    ExactRewardConfig,
    FormatRewardConfig,
    FunctionRewardConfig,
    HttpRewardConfig,
    JudgeRewardConfig,
    LengthRewardConfig,
    LetterCountRewardConfig,
    MathRewardConfig,
    NumericRewardConfig,
    ReasoningGymRewardConfig,
    RewardConfig,
    ScalarModelRewardConfig,
    WeightedRewardConfig,
)
from megarl.task.code import CodeReward
from megarl.task.function import FunctionReward
from megarl.task.process import describe, load_callable
from megarl.task.reward import AnswerFailedError, AsyncReward, DirectReward, RewardFailedError, find_not_finite
from megarl.task.rule_rewards import (
    EnvironmentReward,
    FormatReward,
    LengthReward,
    MathReward,
    NumericReward,
    ReasoningGymReward,
    score_exact,
)
from megarl.task.served_rewards import HttpReward, JudgeReward, ScalarModelReward
from megarl.types import FinishReason, Prompt, Response, RewardFunction, Score

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


def build_reward(config: RewardConfig) -> AsyncReward:
    """The reward of this configuration. Raises ConfigError naming the key that is wrong, or what is not installed."""
    if isinstance(config, WeightedRewardConfig):
        parts = {part.name: Part(_build_part(part), part.weight) for part in read_parts(config)}
        return WeightedReward(parts, config.correct_by, config.correct_at)
    reward = KINDS[type(config)](config)
    return reward if isinstance(reward, AsyncReward) else DirectReward(reward)


TOYS = "megarl.examples.toys.rewards:"
KINDS: Mapping[type[RewardConfig], Callable[[Any], AsyncReward | RewardFunction]] = {
    AdditionRewardConfig: lambda config: load_callable(TOYS + "score_addition"),
    CodeRewardConfig: CodeReward,
    EnvironmentRewardConfig: lambda config: EnvironmentReward(config.correct_at),
    ExactRewardConfig: lambda config: score_exact,
    FormatRewardConfig: FormatReward,
    FunctionRewardConfig: FunctionReward,
    HttpRewardConfig: HttpReward,
    JudgeRewardConfig: JudgeReward,
    LengthRewardConfig: lambda config: LengthReward(config.min_length, config.max_length, config.falloff),
    LetterCountRewardConfig: lambda config: load_callable(TOYS + "LetterCountReward")(config.tolerance, config.falloff),
    MathRewardConfig: MathReward,
    NumericRewardConfig: NumericReward,
    ReasoningGymRewardConfig: ReasoningGymReward,
    ScalarModelRewardConfig: ScalarModelReward,
}


def _build_part(part: RewardPart) -> AsyncReward:
    """Raises ConfigError with the full key of what is wrong."""
    try:
        return build_reward(part.config)
    except ConfigError as error:
        key = f"reward.parts.{part.name}"
        raise ConfigError(
            [key + text.removeprefix("reward") if text.startswith("reward") else text for text in error.problems]
        ) from error


def reads_answers(config: RewardConfig) -> bool:
    """Whether this verifier fills Score.answer; a function of the user's may, too."""
    if isinstance(config, WeightedRewardConfig):
        parts = {part.name: part.config for part in read_parts(config)}
        return any(map(reads_answers, [parts[config.correct_by]] if config.correct_by else parts.values()))
    return isinstance(config, AdditionRewardConfig | ExactRewardConfig | MathRewardConfig | NumericRewardConfig)


EMPTY = Response((0,), "", (0.0,), (True,), (0,), FinishReason.stop)
"""One token of empty text: the end of the sequence, sampled at once."""


class Scorer:
    """Awaits a reward and turns its failures into scores that say so.

    `score` may be awaited many times at once, on one event loop; `close` may be called from any thread.
    """

    def __init__(self, reward: AsyncReward | RewardFunction):
        self._reward = reward if isinstance(reward, AsyncReward) else DirectReward(reward)

    async def score(self, prompt: Prompt, response: Response) -> Score:
        """The reward's score. Where it raises, hangs, dies or gives no finite number: a score with `failure`, one line
        that is equal for equal causes, as far as what a verifier raises allows it."""
        try:
            score = await self._reward.score(prompt, response)
        except RewardFailedError as error:
            return fail(str(error))
        except Exception as error:
            return fail(f"the reward raised {describe(error)}")
        bad = find_not_finite(score)
        return score if bad is None else fail(bad)

    def check(self, prompts: Iterable[Prompt], wrong: float = 0.0, chosen: str = "reward=... with data=...") -> None:
        """Score an empty response to each prompt, which shows whether the reward can read the data's answers; where the
        user's own function scores, also the answer.

        Meant for the first prompt of each split, before anything is started; not from a coroutine. wrong: reward.wrong,
        with which the scores must be in [0, 1]. chosen: the reward and the data, for the message. Raises
        ConfigError.
        """

        async def check_all() -> None:
            for prompt in prompts:
                try:
                    score = await self._reward.check(prompt, EMPTY)
                    if score is not None:
                        if bad := find_not_finite(score):
                            raise RewardFailedError(bad)
                        check_score(score.reward, wrong)
                except ConfigError:
                    raise
                except (ValueError, RewardFailedError) as error:
                    is_answer = isinstance(error, AnswerFailedError)
                    what = "the reference answer as a response" if is_answer else "an empty response"
                    asked = prompt.messages[-1].content if prompt.messages else prompt.text
                    shown = repr(asked if len(asked) <= 60 else f"{asked[:60]}...")
                    raise ConfigError([f"{chosen}: {what} to {shown} cannot be scored: {error}"]) from error

        # A thread of its own: the caller's may have an event loop that runs, as in a notebook.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, check_all()).result()

    def state(self) -> Any:
        """As `AsyncReward.state`."""
        return self._reward.state()

    def load_state(self, state: Any) -> None:
        """As `AsyncReward.load_state`."""
        self._reward.load_state(state)

    def close(self) -> None:
        """End what the reward has started; what is being scored fails."""
        self._reward.close()


def fail(reason: str) -> Score:
    """The score of a response without a reward."""
    return Score(0.0, False, failure=reason)


def build_scorer(config: RewardConfig) -> Scorer:
    """The scorer of this configuration. Raises ConfigError as `build_reward`."""
    return Scorer(build_reward(config))
