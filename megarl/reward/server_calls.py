"""Calls of a server that scores responses: JSON over HTTP with deadlines, retries and a limit on calls at a time."""

import asyncio
import json
import os
import weakref
from typing import Any

import httpx

from megarl.config.errors import ConfigError
from megarl.config.schema.reward import ServerRewardConfig
from megarl.reward.interface import RewardFailedError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
CHECK_DEADLINE_S = 20.0
"""Of the first call, before anything starts"""
RETRIED = (408, 425, 429, *range(500, 600))
"""Statuses after which the same call may succeed"""
SHOWN = 300
"""Characters of a server's error in a message"""


class ScoringServer:
    """The server at reward.url. Its calls may come from any event loop; each loop has connections of its own."""

    def __init__(self, config: ServerRewardConfig):
        """Raises ConfigError for a url that is none, or a key that is not in the environment."""
        self.url = config.url.rstrip("/")
        if not self.url.startswith(("http://", "https://")) or not httpx.URL(self.url).host:
            raise ConfigError([f"reward.url: found {config.url!r}; it must be as in http://127.0.0.1:30000"])
        self._headers: dict[str, str] = {}
        if config.api_key_env is not None:
            if not os.environ.get(config.api_key_env):
                raise ConfigError([f"reward.api_key_env: found {config.api_key_env!r}, which the environment lacks"])
            self._headers["Authorization"] = f"Bearer {os.environ[config.api_key_env]}"
        self._deadline_s, self._num_retries = config.deadline_s, config.num_retries
        self._max_concurrent = config.max_concurrent
        self._by_loop: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[httpx.AsyncClient, asyncio.Semaphore]
        ] = weakref.WeakKeyDictionary()

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The server's answer to this JSON, decoded.

        A call that gets no answer within reward.deadline_s, or a temporary error, is sent again up to
        reward.num_retries times. Raises RewardFailedError with the last reason.
        """
        client, free = self._find_client()
        reason = ""
        for attempt in range(self._num_retries + 1):
            if attempt:
                await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)))
            async with free:
                try:
                    async with asyncio.timeout(self._deadline_s):
                        answer = await client.post(path, json=body)
                except TimeoutError:
                    reason = f"gave no answer within reward.deadline_s={self._deadline_s:g} s"
                    continue
                except (httpx.TransportError, OSError) as error:
                    reason = f"could not be reached ({type(error).__name__})"
                    continue
            if answer.status_code == 200:
                return self._decode(path, answer)
            reason = f"answered {answer.status_code}: {' '.join(answer.text.split())[:SHOWN]}"
            if answer.status_code not in RETRIED:
                break
        raise RewardFailedError(f"{self.url}{path} {reason}")

    def read_info(self, path: str) -> Any:
        """A GET before anything starts. Raises ConfigError where the server does not answer it."""
        try:
            answer = httpx.get(self.url + path, headers=self._headers, timeout=CHECK_DEADLINE_S, trust_env=False)
            answer.raise_for_status()
            return answer.json()
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise ConfigError([f"reward.url: found {self.url}; GET {path} failed there: {error}"]) from error

    def _decode(self, path: str, answer: httpx.Response) -> Any:
        try:
            return answer.json()
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise RewardFailedError(f"{self.url}{path} answered with something else than JSON") from error

    def _find_client(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            # The deadline is asyncio's: httpx's own are of each read and write.
            limits = httpx.Limits(max_connections=self._max_concurrent)
            client = httpx.AsyncClient(
                base_url=self.url, headers=self._headers, timeout=None, limits=limits, trust_env=False
            )
            self._by_loop[loop] = client, asyncio.Semaphore(self._max_concurrent)
        return self._by_loop[loop]
