"""Scores responses as they come, whatever a verifier does."""

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megarl.algo.rewards import check_score
from megarl.config.errors import ConfigError
from megarl.config.schema.reward import RewardConfig
from megarl.reward.build import EMPTY, build_async_reward
from megarl.reward.interface import AnswerFailedError, AsyncReward, DirectReward, RewardFailedError, find_not_finite
from megarl.sandbox.function_server import describe
from megarl.types import Prompt, Response, RewardFunction, Score

LONGEST_SHOWN = 60
"""Characters of a prompt in a message"""


class Scorer:
    """Awaits a reward and turns its failures into scores that say so.

    `score` may be awaited many times at once, on one event loop; `close` may be called from any thread.
    """

    def __init__(self, reward: AsyncReward | RewardFunction):
        self._reward = reward if isinstance(reward, AsyncReward) else DirectReward(reward)

    async def score(self, prompt: Prompt, response: Response) -> Score:
        """The reward's score. Where it raises, hangs, dies or gives no finite number: a score with `failure`.

        A failure is one line, equal for equal causes, as far as what a verifier raises allows it.
        """
        try:
            score = await self._reward.score(prompt, response)
        except RewardFailedError as error:
            return fail(str(error))
        except Exception as error:
            return fail(f"the reward raised {describe(error)}")
        bad = find_not_finite(score)
        return score if bad is None else fail(bad)

    def check(
        self, prompts: Iterable[Prompt], wrong: float = 0.0, chosen: str = "reward=... with data=..."
    ) -> list[str]:
        """Score an empty response to each prompt, which shows whether the reward can read the data's answers; where the
        user's own function scores, also the answer.

        Meant for the first prompt of each split, before anything is started; not from a coroutine. wrong: reward.wrong,
        with which the scores must be in [0, 1]. chosen: the reward and the data, for the message. Returns
        what the reward says and is not used, in sentences. Raises ConfigError.
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
                    raise ConfigError([f"{chosen}: {what} to {_shorten(prompt)} cannot be scored: {error}"]) from error

        # A thread of its own: the caller's may have an event loop that runs, as in a notebook.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, check_all()).result()
        return self._reward.list_notes()

    def state(self) -> Any:
        """As `AsyncReward.state`."""
        return self._reward.state()

    def load_state(self, state: Any) -> None:
        """As `AsyncReward.load_state`."""
        self._reward.load_state(state)

    def close(self) -> None:
        """End what the reward has started; what is being scored fails."""
        self._reward.close()


def _shorten(prompt: Prompt) -> str:
    """The question, or its beginning."""
    text = prompt.messages[-1].content if prompt.messages else prompt.text
    return repr(text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}...")


def fail(reason: str) -> Score:
    """The score of a response without a reward."""
    return Score(0.0, False, failure=reason)


def build_scorer(config: RewardConfig) -> Scorer:
    """The scorer of this configuration.

    Raises ConfigError naming the key that is out of range, or what is not installed or not importable.
    """
    return Scorer(build_async_reward(config))
