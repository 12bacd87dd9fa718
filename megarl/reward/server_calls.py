"""Calls of a server that scores responses: JSON over HTTP with deadlines, retries and a limit on calls at a time."""

import asyncio
import os
import weakref
from typing import Any
from urllib.parse import urlsplit

import httpx

from megarl.config.errors import ConfigError
from megarl.config.schema.reward import ServerRewardConfig
from megarl.json_text import parse_json
from megarl.reward.interface import RewardFailedError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
CHECK_DEADLINE_S = 20.0
"""Of the first call, before anything starts"""
RETRIED = (408, 425, 429, *range(500, 600))
"""Statuses after which the same call may succeed"""
MAX_ANSWER_BYTES = 2**24
SHOWN = 300
"""Characters of a server's error in a message"""


class ScoringServer:
    """The server at reward.url. Its calls may come from any event loop; each loop has connections of its own."""

    def __init__(self, config: ServerRewardConfig):
        """Raises ConfigError for a url that is none, or a key that is not in the environment."""
        self.url = check_url(config.url)
        self._headers: dict[str, str] = {}
        if config.api_key_env is not None:
            if not os.environ.get(config.api_key_env):
                found = f"found {config.api_key_env!r}; this environment variable is not set"
                raise ConfigError([f"reward.api_key_env: {found}"])
            self._headers["Authorization"] = f"Bearer {os.environ[config.api_key_env]}"
        self._timeout_s, self._max_retries = config.timeout_s, config.max_retries
        self._max_concurrency = config.max_concurrency
        self._by_loop: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[httpx.AsyncClient, asyncio.Semaphore]
        ] = weakref.WeakKeyDictionary()

    def locate(self, path: str) -> str:
        """The address of a path of the server; "": reward.url as it is written."""
        return self.url.rstrip("/") + path if path else self.url

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The server's answer to this JSON, decoded.

        A call that gets no answer within reward.timeout_s, or a temporary error, is sent again up to reward.max_retries
        times. Raises RewardFailedError with the last reason. Redirects are refused.
        """
        client, free = self._find_client()
        attempts = self._max_retries + 1
        for attempt in range(attempts):
            if attempt:
                await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)))
            async with free:
                try:
                    async with asyncio.timeout(self._timeout_s):
                        status, content = await self._post_once(client, path, body)
                except TimeoutError:
                    reason = f"gave no answer within reward.timeout_s={self._timeout_s:g} s"
                    continue
                except (httpx.TransportError, OSError) as error:
                    reason = f"could not be reached ({type(error).__name__})"
                    continue
            if status == 200:
                return self._decode(path, content)
            shown = " ".join(content.decode(errors="replace").split())[:SHOWN]
            redirect = "; redirects are not followed" if 300 <= status < 400 else ""
            reason = f"answered with status {status}{redirect}{': ' if shown else ''}{shown}"
            if status not in RETRIED:
                raise RewardFailedError(f"{self.locate(path)} {reason}")
        raise RewardFailedError(f"{self.locate(path)} {reason} ({attempts} attempt{'s' if attempts > 1 else ''})")

    async def _post_once(self, client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Status and content. Raises RewardFailedError for an answer that is too long."""
        content = bytearray()
        async with client.stream("POST", self.locate(path), json=body) as answer:
            async for chunk in answer.aiter_bytes():
                content += chunk
                if len(content) > MAX_ANSWER_BYTES:
                    raise RewardFailedError(f"{self.locate(path)} answered with over {MAX_ANSWER_BYTES} bytes")
        return answer.status_code, bytes(content)

    def read_info(self, path: str) -> Any:
        """A GET before anything starts. Raises ConfigError where the server does not answer it."""
        try:
            answer = httpx.get(self.locate(path), headers=self._headers, timeout=CHECK_DEADLINE_S, trust_env=False)
            answer.raise_for_status()
            return answer.json()
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise ConfigError([f"reward.url: found {self.url}; GET {path} failed there: {error}"]) from error

    def _decode(self, path: str, content: bytes) -> Any:
        try:
            return parse_json(content)
        except ValueError:
            raise RewardFailedError(f"{self.locate(path)} answered with what is not JSON") from None

    def _find_client(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            # The deadline is asyncio's: httpx's own are of each read and write.
            limits = httpx.Limits(max_connections=self._max_concurrency)
            client = httpx.AsyncClient(headers=self._headers, timeout=None, limits=limits, trust_env=False)
            self._by_loop[loop] = client, asyncio.Semaphore(self._max_concurrency)
        return self._by_loop[loop]


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
