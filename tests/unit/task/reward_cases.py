"""Prompts and responses for the tests of the verifiers, and the end of processes."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import psutil

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


def ask(scorer: scorer.Scorer, *texts: str, answer: str = "85", prompt: Prompt | None = None) -> list[Score]:
    """The scores of responses with these texts, at the same time."""

    async def run() -> list[Score]:
        given = prompt or build_prompt(answer)
        return await asyncio.gather(*(scorer.score(given, build_response(text)) for text in texts))

    return asyncio.run(run())


def wait_until_gone(*pids: int) -> None:
    """Adopted processes are reaped by init, a moment later or never."""
    deadline = time.monotonic() + 60
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            while process.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline, f"process {pid} runs"
                time.sleep(0.02)
