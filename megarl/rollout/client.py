"""HTTP client of one SGLang server, parallel calls to several, why one was lost, and what memory they gave back.

Every call has a deadline, and an error names the server and the call.
"""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import httpx

from megarl.config.schema.run import ServerOffload
from megarl.interfaces import UNPUBLISHED, DeadlineError
from megarl.report.timeline import span

T = TypeVar("T")

_left_over: WeakSet[threading.Thread] = WeakSet()
"""Threads of abandoned calls; they may still be cleaning up on a server"""

CONNECT_DEADLINE_S = 10.0
FIND_DEADLINE_S = 3.0
"""How long to wait for an exit status: a connection breaks before the process behind it has been reaped."""
URGENT = 100
"""Priority of a request that preempts those without one, where the server schedules by priority"""
ONLY_AT_THE_END = 1 << 30
"""Tokens between two messages about a streamed response: it comes as a whole, after its first token"""
UNFINISHED = b'"finish_reason":null'
"""In a message about a response that goes on, and in no other: quotes within a text are escaped"""


class RequestError(RuntimeError):
    """A server answered with an error; the message has the server, the path, the status and the body."""


class ConnectionLostError(RuntimeError):
    """A server could not be reached or ended before it answered; the request may be sent again."""


class SGLangClient:
    """Client of one server. Thread-safe; its coroutines are for one event loop.

    Token ids are checked here: an id outside the vocabulary kills a server.
    """

    def __init__(self, url: str, *, vocab_size: int, deadline_s: float, api_key: str | None = None):
        """deadline_s: the default of all calls. api_key: the server's key, where it requires one."""
        self.url = url.rstrip("/")
        self._vocab_size = vocab_size
        self._deadline_s = deadline_s
        self._api_key = api_key
        # The servers are on this machine or in this cluster: a proxy from the environment does not apply.
        headers = {"Authorization": f"Bearer {api_key}"} if api_key is not None else {}
        self._http = httpx.Client(base_url=self.url, trust_env=False, headers=headers)
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._generation = httpx.AsyncClient(
            base_url=self.url,
            trust_env=False,
            headers=headers,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            timeout=httpx.Timeout(None, connect=min(CONNECT_DEADLINE_S, deadline_s)),
        )

    def close(self) -> None:
        """Close the connections but for those of coroutines, which `close_generation` closes."""
        self._http.close()

    async def close_generation(self) -> None:
        await self._generation.aclose()

    def abort(self) -> None:
        """Break the calls in flight in other threads: each raises ConnectionLostError. Later calls reconnect."""
        # Only a shutdown wakes a thread that is blocked in recv; closing a socket does not.
        for each in list(self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def generate(
        self, input_ids: Sequence[Sequence[int]], params: Any, *, deadline_s: float | None = None, **fields: Any
    ) -> list[dict[str, Any]]:
        """SGLang's answers to a batch of prompts, in order; with `n` in params, n per prompt.

        Raises ValueError for an empty batch, an empty prompt or a token id outside the vocabulary.
        """
        check_token_ids(input_ids, self._vocab_size)
        body = {"input_ids": [list(ids) for ids in input_ids], "sampling_params": params, "stream": False}
        return list(self._call("/generate", body | fields, deadline_s))

    async def generate_turn(self, token_ids: Sequence[int], params: Mapping[str, Any], **fields: Any) -> bytes:
        """SGLang's answer to one request, as JSON.

        Raises ValueError for an empty prompt or a token id outside the vocabulary, RequestError, ConnectionLostError,
        DeadlineError.
        """
        check_token_ids([token_ids], self._vocab_size)
        body = {"input_ids": list(token_ids), "sampling_params": dict(params), "stream": False, **fields}
        async with self._generating(body) as answer:
            return await answer.aread()

    async def generate_batch(
        self, token_ids: Sequence[Sequence[int]], params: Sequence[Mapping[str, Any]], **fields: Any
    ) -> AsyncIterator[bytes]:
        """SGLang's answers to one batch of requests, each as JSON, in the order in which they are complete.

        The batch reaches SGLang's scheduler as a whole, so that it is computed alike whenever it is sent. An answer's
        place in the batch is its "index". Raises as `generate_turn`.
        """
        check_token_ids(token_ids, self._vocab_size)
        streamed = [{**each, "stream_interval": ONLY_AT_THE_END} for each in params]
        body = {"input_ids": [list(ids) for ids in token_ids], "sampling_params": streamed, "stream": True, **fields}
        async with self._generating(body) as answer:
            async for line in _read_lines(answer):
                if line == b"data: [DONE]":
                    return
                if line.startswith(b'data: {"error"'):
                    raise RequestError(f"{self.url}/generate: {line[6:].decode(errors='replace')[:2000]}")
                if line.startswith(b"data: ") and UNFINISHED not in line:
                    yield line[6:]
        raise ConnectionLostError(f"{self.url}/generate: the answer ended before its last response")

    @contextlib.asynccontextmanager
    async def _generating(self, body: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
        with self._explaining("/generate", self._deadline_s, "requests"):
            async with (
                asyncio.timeout(self._deadline_s),
                self._generation.stream("POST", "/generate", json=body) as answer,
            ):
                if answer.status_code != 200:
                    text = (await answer.aread()).decode(errors="replace")
                    raise RequestError(f"{self.url}/generate answered {answer.status_code}: {text[:2000]}")
                yield answer

    def flush_cache(self, wait_s: float = 30.0) -> None:
        """Drop all cached prefixes, once no request is left. Raises RequestError where some are left after `wait_s`."""
        self._call(f"/flush_cache?timeout={wait_s:g}", {})

    def score(self, token_ids: Sequence[int], *, deadline_s: float | None = None) -> list[float]:
        """Log-probs (temperature 1) of token_ids[1:], each given the tokens before it; ahead of queued requests.

        Raises ValueError for fewer than two tokens.
        """
        if len(token_ids) < 2:
            raise ValueError(f"score: {len(token_ids)} token(s); at least two are needed")
        params = {"max_new_tokens": 0, "temperature": 1.0}
        fields = {"return_logprob": True, "logprob_start_len": 0, "priority": URGENT}
        (answer,) = self.generate([token_ids], params, deadline_s=deadline_s, **fields)
        entries = answer["meta_info"]["input_token_logprobs"]
        found = [entry[1] for entry in entries]
        # SGLang 0.5.23 scores the vocabulary's last id like any other but reports it as 0.
        if found != [0 if token == self._vocab_size - 1 else token for token in token_ids]:
            raise RequestError(f"{self.url}/generate scored the tokens {found}; {list(token_ids)} were sent")
        return [float(entry[0]) for entry in entries[1:]]

    def is_healthy(self, deadline_s: float = 20.0, *, generating: bool = False) -> bool:
        """Whether the server answers; with `generating`, whether it generates a token, which takes a second or more."""
        with contextlib.suppress(httpx.HTTPError):
            path = "/health_generate" if generating else "/health"
            return self._http.get(path, timeout=deadline_s).status_code == 200
        return False

    def load_weight_version(self) -> int:
        """The weight version that the server reports. Raises RequestError where it is not a number."""
        reported = self._call("/model_info", method="GET")["weight_version"]
        if not reported.removeprefix("-").isdecimal():
            raise RequestError(f"{self.url} reports weight version {reported!r}; a number was expected")
        return int(reported)

    def set_weight_version(self, version: int, *, deadline_s: float | None = None) -> None:
        """Label tokens generated from now on with `version`; earlier tokens of requests in flight keep theirs."""
        self._call("/update_weight_version", {"new_version": str(version), "abort_all_requests": False}, deadline_s)

    def pause(self, mode: str = "retract") -> None:
        """Stop generating. Mode retract: running requests wait, and their KV cache is recomputed on resume."""
        self._call("/pause_generation", {"mode": mode})

    def resume(self, *, deadline_s: float | None = None) -> None:
        self._call("/continue_generation", {}, deadline_s)

    def reset(self) -> None:
        """Clean up after a failed rollout or sync: abort requests, end an open update session, resume."""
        # Paused first: SGLang ends a session either during a pause or once no request is left.
        self.pause()
        try:
            self.end_update()
        except RequestError as error:
            if "no weight-update session is open" not in str(error):
                raise
        self.abort_requests()
        self.resume()

    def abort_requests(self) -> None:
        self._call("/abort_request", {"abort_all": True})

    def release_memory(self, tags: Sequence[str]) -> None:
        """Give memory of the GPU back: of the KV cache, of the weights. The server must be idle."""
        self._call("/release_memory_occupation", {"tags": list(tags)})

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Take memory again that was given back."""
        self._call("/resume_memory_occupation", {"tags": list(tags)})

    def begin_update(self) -> None:
        self._call("/begin_weight_update", {})

    def end_update(self, *, deadline_s: float | None = None) -> None:
        self._call("/end_weight_update", {}, deadline_s)

    def update_weights_from_disk(self, directory: Path, *, deadline_s: float | None = None) -> None:
        """Load a Hugging Face checkpoint directory into the running model and drop cached prefixes."""
        body = {"model_path": str(directory), "flush_cache": True}
        self._call("/update_weights_from_disk", body, deadline_s)

    def update_weights_from_tensor(
        self, payloads: Sequence[str], load_format: str, *, flush_cache: bool, deadline_s: float | None = None
    ) -> None:
        """Pass every rank of the server its payload, for the loader `load_format`; within a weight update."""
        body = {"serialized_named_tensors": list(payloads), "load_format": load_format, "flush_cache": flush_cache}
        self._call("/update_weights_from_tensor", body, deadline_s)

    def load_checksums(self) -> list[dict[str, str]]:
        """For each rank: 16 hex digits by SGLang's tensor name, on a CPU of SHA-256 over the raw bytes."""
        answer = self._call("/weights_checker", {"action": "checksum"})
        return [dict(rank["checksums"]) for rank in answer["ranks"]]

    def _call(self, path: str, body: Any = None, deadline_s: float | None = None, *, method: str = "POST") -> Any:
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        timeout = httpx.Timeout(deadline_s, connect=min(CONNECT_DEADLINE_S, deadline_s))
        with self._explaining(path, deadline_s, "calls"):
            answer = self._http.request(
                method, path, json=body, timeout=timeout, extensions={"trace": self._remember_socket}
            )
        if answer.status_code != 200:
            raise RequestError(f"{self.url}{path} answered {answer.status_code}: {answer.text[:2000]}")
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        content = answer.json() if is_json else answer.text
        if isinstance(content, dict) and content.get("success") is False:
            raise RequestError(f"{self.url}{path} refused: {content.get('message')}")
        return content

    @contextlib.contextmanager
    def _explaining(self, path: str, deadline_s: float, track: str) -> Iterator[None]:
        """Raises what goes wrong with a request as DeadlineError or ConnectionLostError, which name it."""
        started = time.monotonic()
        try:
            with span(path.partition("?")[0], process=f"SGLang server {self.url}", track=track):
                yield
        except (httpx.ReadTimeout, TimeoutError) as error:
            raise DeadlineError(f"{self.url}{path} gave no answer within {deadline_s:g} s") from error
        except (httpx.TransportError, OSError) as error:
            lost_after = time.monotonic() - started
            raise ConnectionLostError(
                f"{self.url}{path}: {error or type(error).__name__} (after {lost_after:.1f} s)"
            ) from error

    def _remember_socket(self, event: str, info: Mapping[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            self._sockets.add(info["return_value"].get_extra_info("socket"))


def check_token_ids(input_ids: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raises ValueError naming the prompt's index for a prompt without tokens or with an id out of range."""
    if not input_ids:
        raise ValueError("generate: no prompts")
    for row, ids in enumerate(input_ids):
        if not len(ids):
            raise ValueError(f"generate: prompt {row} has no tokens")
        if min(ids) < 0 or max(ids) >= vocab_size:
            bad = next(i for i in ids if not 0 <= i < vocab_size)
            raise ValueError(f"generate: prompt {row} has token id {bad}; the largest is {vocab_size - 1}")


async def _read_lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of an answer without their ends; a long line costs no more than its bytes."""
    parts: list[bytes] = []
    async for chunk in answer.aiter_bytes():
        *complete, rest = chunk.split(b"\n")
        for line in complete:
            if whole := b"".join([*parts, line]):
                yield whole
            parts.clear()
        parts.append(rest)


def run_in_parallel(jobs: Sequence[Callable[[], T]], clients: Sequence[SGLangClient]) -> list[T]:
    """Run each job in a thread of its own; returns their results in order. clients: what the jobs call.

    The first failure, or an exception in the waiting thread (Stopped), is raised at once; jobs that have not begun do
    not begin then, and the clients' calls in flight are broken. The threads are daemons, so that one that still hangs
    (while it connects, say) does not keep the process from ending, as the threads of an executor would.
    """
    is_abandoned = threading.Event()
    futures: list[Future[T]] = [Future() for _ in jobs]

    def run(job: Callable[[], T], future: Future[T]) -> None:
        try:
            if is_abandoned.is_set():
                raise CancelledError
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)

    threads = [
        threading.Thread(target=run, args=pair, name="megarl-call", daemon=True)
        for pair in zip(jobs, futures, strict=True)
    ]
    try:
        for thread in threads:
            thread.start()
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            if future in done:
                future.result()
        return [future.result() for future in futures]
    except BaseException:
        is_abandoned.set()
        _left_over.update(threads)
        for client in clients:
            client.abort()
        raise


def wait_left_over(deadline_s: float) -> None:
    """Wait for the threads of abandoned calls; until they end, they may still call a server.

    Raises DeadlineError where one is still running after `deadline_s`.
    """
    end = time.monotonic() + deadline_s
    for thread in list(_left_over):
        if thread.ident is not None:
            thread.join(max(0.0, end - time.monotonic()))
    num_left = sum(thread.is_alive() for thread in _left_over)
    if num_left:
        raise DeadlineError(f"{num_left} abandoned calls to SGLang servers have not ended within {deadline_s:g} s")


def find_cause(check_processes: Callable[[], None] | None) -> RuntimeError | None:
    """The error that `check_processes` raises for a server that is down, polled for FIND_DEADLINE_S; None: all run."""
    end = time.monotonic() + FIND_DEADLINE_S
    while check_processes is not None:
        try:
            check_processes()
        except RuntimeError as error:
            return error
        if time.monotonic() > end:
            break
        time.sleep(0.2)
    return None


CACHE = "kv_cache"
WEIGHTS = "weights"
"""SGLang's names (sglang/srt/constants.py)"""
TAGS = {None: (), ServerOffload.kv_cache: (CACHE,), ServerOffload.all: (CACHE, WEIGHTS)}


class ServerOffloader:
    """Memory of GPUs that servers give back while roles compute on the same GPUs, and take again (rollout.offload).

    SGLang unmaps the memory and keeps its addresses, so that CUDA graphs stay valid; they stay on the GPU themselves.
    Its servers must be idle. Weights come back undefined: a weight sync overwrites all of them and verifies their
    checksums. Without `offload` every method does nothing.
    """

    def __init__(self, clients: Sequence[SGLangClient] = (), offload: ServerOffload | None = None) -> None:
        """clients: of all servers, which hold all of their memory."""
        self.offload = offload
        self._clients = list(clients)
        self._released: set[str] = set()

    @property
    def has_released(self) -> bool:
        """Whether the servers cannot generate before the next weight sync."""
        return bool(self._released)

    def release(self) -> None:
        """Have the servers give back their memory, where they hold it; requests in flight are aborted.

        They then serve no version of the weights, so that nothing they generate before the next sync is used. A server
        that is lost has no memory either. Raises RequestError where a server is not idle, and DeadlineError.
        """
        if tags := [tag for tag in TAGS[self.offload] if tag not in self._released]:
            self._released.update(tags)
            self._call_all(partial(_release, tags=tags))

    def resume(self, tag: str) -> None:
        """Take memory again: of the weights, whose values are undefined until they are replaced, or of the empty KV
        cache."""
        if tag in self._released:
            self._call_all(lambda client: client.resume_memory([tag]))
            self._released.remove(tag)

    def forget(self) -> None:
        """All servers were restarted, and hold all of their memory."""
        self._released.clear()

    def _call_all(self, ask: Callable[[SGLangClient], None]) -> None:
        run_in_parallel([partial(ask, client) for client in self._clients], self._clients)


def _release(client: SGLangClient, tags: Sequence[str]) -> None:
    with contextlib.suppress(ConnectionLostError):
        client.set_weight_version(UNPUBLISHED)
        # SGLang ends where it is not idle.
        client.abort_requests()
        client.flush_cache()
        client.release_memory(tags)
