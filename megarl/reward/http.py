"""A reward that a server answers over HTTP."""

import asyncio
import json
import os
from typing import Any
from urllib.parse import urlsplit

import httpx

from megarl.config.errors import ConfigError
from megarl.config.schema.reward import HttpRewardConfig
from megarl.reward.interface import AsyncReward, RewardFailedError
from megarl.types import Prompt, Response, Score

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
"""Seconds before the first further attempt, and before each later one at most; they double"""
MAX_ANSWER_BYTES = 2**20
KEYS = frozenset({"reward", "correct", "details"})


class HttpReward(AsyncReward):
    """POSTs {"prompt", "response", "answer", "metadata"} as JSON and reads {"reward", "correct", "details"}.

    "correct" may be left out: it is then whether the reward is at least 1; so may "details", numbers by name. Status
    429, 5xx, a lost connection and a passed deadline are tried again. Redirects are refused.
    """

    def __init__(self, config: HttpRewardConfig):
        """Raises ConfigError for what is no URL, and for an environment variable that is not set."""
        self._url, self._config = check_url(config.url), config
        self._headers = {}
        if config.api_key_env is not None:
            key = os.environ.get(config.api_key_env)
            if not key:
                raise ConfigError(
                    [f"reward.api_key_env: found {config.api_key_env!r}; this environment variable is not set"]
                )
            self._headers = {"Authorization": f"Bearer {key}"}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: httpx.AsyncClient | None = None
        self._slots = asyncio.Semaphore(config.max_concurrency)

    async def score(self, prompt: Prompt, response: Response) -> Score:
        question = {
            "prompt": prompt.text,
            "response": response.text,
            "answer": prompt.answer,
            "metadata": dict(prompt.metadata),
        }
        client, attempts = self._get_client(), self._config.max_retries + 1
        for attempt in range(attempts):
            if attempt:
                await asyncio.sleep(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (attempt - 1)))
            async with self._slots:
                found = await self._ask(client, question)
            if isinstance(found, Score):
                return found
        raise RewardFailedError(f"{found} ({attempts} attempt{'s' if attempts > 1 else ''})")

    async def _ask(self, client: httpx.AsyncClient, question: dict[str, Any]) -> Score | str:
        """The score, or why another attempt may help. Raises RewardFailedError where none would."""
        try:
            async with asyncio.timeout(self._config.timeout_s):
                async with client.stream("POST", self._url, json=question) as answer:
                    if answer.status_code == 429 or answer.status_code >= 500:
                        return f"the reward's server answered with status {answer.status_code}"
                    if answer.status_code != 200:
                        redirect = "; redirects are not followed" if answer.is_redirect else ""
                        raise RewardFailedError(
                            f"the reward's server answered with status {answer.status_code}{redirect}"
                        )
                    content = bytearray()
                    async for chunk in answer.aiter_bytes():
                        content += chunk
                        if len(content) > MAX_ANSWER_BYTES:
                            raise RewardFailedError(f"the reward's server answered with over {MAX_ANSWER_BYTES} bytes")
        except TimeoutError:
            return f"the reward took longer than reward.timeout_s={self._config.timeout_s:g} s"
        except httpx.HTTPError as error:
            return f"the reward's server could not be asked: {type(error).__name__}"
        return read_answer(bytes(content))

    def _get_client(self) -> httpx.AsyncClient:
        """The client of the running event loop; that of another loop, which has ended, cannot be used."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            limits = httpx.Limits(max_connections=self._config.max_concurrency)
            self._client = httpx.AsyncClient(headers=self._headers, timeout=None, limits=limits)
            self._loop, self._slots = loop, asyncio.Semaphore(self._config.max_concurrency)
        return self._client

    def close(self) -> None:
        if self._client is not None and self._loop is not None and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop)


def read_answer(content: bytes) -> Score:
    """The score in a server's answer. Raises RewardFailedError saying what is wrong with it."""
    try:
        answer = json.loads(content)
    except ValueError:
        raise RewardFailedError("the reward's server answered with what is not JSON") from None
    if not isinstance(answer, dict) or not _is_number(answer.get("reward")):
        raise RewardFailedError('the reward\'s server answered without a number under "reward"')
    reward, details = float(answer["reward"]), answer.get("details") or {}
    correct = answer.get("correct", reward >= 1)
    if not isinstance(correct, bool):
        raise RewardFailedError('the reward\'s server answered with "correct" that is neither true nor false')
    if not isinstance(details, dict) or not all(map(_is_number, details.values())):
        raise RewardFailedError('the reward\'s server answered with "details" that are not numbers by name')
    return Score(reward, correct, {name: float(value) for name, value in details.items()})


def check_url(url: str) -> str:
    """Raises ConfigError for what is not http:// or https:// with a host, and for a URL with a password."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError([f"reward.url: found {url!r}; it must be http://HOST:PORT/PATH or https://HOST/PATH"])
    if parts.username or parts.password:
        raise ConfigError(
            ["reward.url: it has a name or password, which the run's folder would keep; name an environment variable"
             " in reward.api_key_env"]
        )  # fmt: skip
    return url


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
