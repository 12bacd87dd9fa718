"""Prompts and responses for the tests of the verifiers."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from megarl.config.schema.task import RewardConfig
from megarl.task import scorer
from megarl.types import FinishReason, Prompt, Response, Score


def build_prompt(answer: str, **metadata: Any) -> Prompt:
    return Prompt("p1", "", (), answer, {key: json.dumps(value) for key, value in metadata.items()})


def build_response(text: str, finish_reason: FinishReason = FinishReason.stop) -> Response:
    return Response((1,), text, (0.0,), (True,), (0,), finish_reason)


def build_reward(config: RewardConfig) -> Callable[[Prompt, Response], Score]:
    """The reward of this configuration as a plain function."""
    reward = scorer.build_reward(config)
    return lambda prompt, response: asyncio.run(reward.score(prompt, response))
