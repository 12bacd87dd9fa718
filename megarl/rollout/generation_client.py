"""Asynchronous client of one SGLang server's /generate, for many requests at a time."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx

from megarl.interfaces import DeadlineError
from megarl.rollout.client import CONNECT_DEADLINE_S, ConnectionLostError, RequestError, check_token_ids
from megarl.timeline import span

ONLY_AT_THE_END = 1 << 30
"""Tokens between two messages about a streamed response: it comes as a whole, after its first token"""
UNFINISHED = b'"finish_reason":null'
"""In a message about a response that goes on, and in no other: quotes within a text are escaped"""


class GenerationClient:
    """Asks one server for responses. For one event loop."""

    def __init__(self, url: str, *, vocab_size: int, deadline_s: float, api_key: str | None = None):
        """deadline_s: of each call. api_key: the server's key, where it requires one."""
        self.url = url.rstrip("/")
        self._vocab_size = vocab_size
        self._deadline_s = deadline_s
        # The servers are on this machine or in this cluster: a proxy from the environment does not apply.
        headers = {"Authorization": f"Bearer {api_key}"} if api_key is not None else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(None, connect=min(CONNECT_DEADLINE_S, deadline_s))
        self._http = httpx.AsyncClient(
            base_url=self.url, trust_env=False, headers=headers, limits=limits, timeout=timeout
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def generate(self, token_ids: Sequence[int], params: Mapping[str, Any], **fields: Any) -> bytes:
        """SGLang's answer to one request, as JSON.

        Raises ValueError for an empty prompt or a token id outside the vocabulary, RequestError, ConnectionLostError,
        DeadlineError.
        """
        check_token_ids([token_ids], self._vocab_size)
        body = {"input_ids": list(token_ids), "sampling_params": dict(params), "stream": False, **fields}
        async with self._posting("/generate", body) as answer:
            return await answer.aread()

    async def generate_batch(
        self, token_ids: Sequence[Sequence[int]], params: Sequence[Mapping[str, Any]], **fields: Any
    ) -> AsyncIterator[bytes]:
        """SGLang's answers to one batch of requests, each as JSON, in the order in which they are complete.

        The batch reaches SGLang's scheduler as a whole, so that it is computed alike whenever it is sent. An answer's
        place in the batch is its "index". Raises as `generate`.
        """
        check_token_ids(token_ids, self._vocab_size)
        streamed = [{**each, "stream_interval": ONLY_AT_THE_END} for each in params]
        body = {"input_ids": [list(ids) for ids in token_ids], "sampling_params": streamed, "stream": True, **fields}
        async with self._posting("/generate", body) as answer:
            async for line in _read_lines(answer):
                if line == b"data: [DONE]":
                    return
                if line.startswith(b'data: {"error"'):
                    raise RequestError(f"{self.url}/generate: {line[6:].decode(errors='replace')[:2000]}")
                if line.startswith(b"data: ") and UNFINISHED not in line:
                    yield line[6:]
        raise ConnectionLostError(f"{self.url}/generate: the answer ended before its last response")

    async def flush_cache(self, wait_s: float = 30.0) -> None:
        """Drop all cached prefixes, once no request is left. Raises RequestError where some are left after `wait_s`."""
        async with self._posting(f"/flush_cache?timeout={wait_s:g}", {}) as answer:
            await answer.aread()

    @contextlib.asynccontextmanager
    async def _posting(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
        started = time.monotonic()
        try:
            with span(path.partition("?")[0], process=f"SGLang server {self.url}", track="requests"):
                async with (
                    asyncio.timeout(self._deadline_s),
                    self._http.stream("POST", path, json=body) as answer,
                ):
                    if answer.status_code != 200:
                        text = (await answer.aread()).decode(errors="replace")
                        raise RequestError(f"{self.url}{path} answered {answer.status_code}: {text[:2000]}")
                    yield answer
        except TimeoutError as error:
            raise DeadlineError(f"{self.url}{path} gave no answer within {self._deadline_s:g} s") from error
        except (httpx.TransportError, OSError) as error:
            lost_after = time.monotonic() - started
            raise ConnectionLostError(
                f"{self.url}{path}: {error or type(error).__name__} (after {lost_after:.1f} s)"
            ) from error


async def _read_lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of an answer without their ends; a long line costs no more than its bytes."""
    parts: list[bytes] = []
    async for chunk in answer.aiter_bytes():
        *complete, rest = chunk.split(b"\n")
        for line in complete:
            parts.append(line)
            whole = b"".join(parts)
            parts.clear()
            if whole:
                yield whole
        parts.append(rest)
