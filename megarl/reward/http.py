"""A reward that a server of the user's answers over HTTP."""

from typing import Any

from megarl.config.schema.reward import HttpRewardConfig
from megarl.reward.interface import AsyncReward, RewardFailedError
from megarl.reward.server_calls import ScoringServer
from megarl.types import Prompt, Response, Score


class HttpReward(AsyncReward):
    """POSTs {"prompt", "response", "answer", "metadata"} as JSON and reads {"reward", "correct", "details"}.

    "correct" may be left out: it is then whether the reward is at least 1; so may "details", numbers by name.
    """

    def __init__(self, config: HttpRewardConfig):
        """Raises ConfigError for what is no URL, and for an environment variable that is not set."""
        self._server = ScoringServer(config)

    async def score(self, prompt: Prompt, response: Response) -> Score:
        """Raises RewardFailedError where the server gives no score."""
        question = {
            "prompt": prompt.text,
            "response": response.text,
            "answer": prompt.answer,
            "metadata": dict(prompt.metadata),
        }
        return read_answer(await self._server.post("", question))


def read_answer(answer: object) -> Score:
    """The score in a server's answer. Raises RewardFailedError saying what is wrong with it."""
    if not isinstance(answer, dict) or not _is_number(answer.get("reward")):
        raise RewardFailedError('the reward\'s server answered without a number under "reward"')
    reward, details = float(answer["reward"]), answer.get("details") or {}
    correct = answer.get("correct", reward >= 1)
    if not isinstance(correct, bool):
        raise RewardFailedError('the reward\'s server answered with "correct" that is neither true nor false')
    if not isinstance(details, dict) or not all(map(_is_number, details.values())):
        raise RewardFailedError('the reward\'s server answered with "details" that are not numbers by name')
    return Score(reward, correct, {name: float(value) for name, value in details.items()})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
