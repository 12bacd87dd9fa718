"""HTTP client of one SGLang server, on an event loop in a thread of its own; parallel calls to several, why one was
lost, and what memory they gave back.

Every call has a deadline, and an error names the server and the call.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import httpx

from megarl.config.schema.root import ServerOffload
from megarl.interfaces import UNPUBLISHED, DeadlineError
from megarl.report.timeline import span

T = TypeVar("T")

CONNECT_DEADLINE_S = 10.0
KEEP_ALIVE_S = 2.0
"""How long an idle connection is kept: less than SGLang does (5 s), so that none is used as it is closed"""
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


POLL_S = 0.2
"""How long a wait sleeps at most before it sees that the loop has ended."""
END_DEADLINE_S = 10.0
"""How long cancelled work may take to end: it closes its connections and its environments."""


class OnEventLoop:
    """Runs coroutines on an event loop in a daemon thread, which the first one starts."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._running: set[Future[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin `work`; the future has its result. Cancelling the future cancels the work. Thread-safe."""
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="megarl-rollout", daemon=True)
                self._thread.start()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._running.add(future)
            future.add_done_callback(self._running.discard)
            return future

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Thread-safe, but not for the loop's own thread.

        An exception in the waiting thread (a signal's) cancels the work and waits for its end. What `work` waits for
        has deadlines. Raises CancelledError (concurrent.futures) after `cancel`.
        """
        ended = threading.Event()

        async def note_end() -> T:
            try:
                return await work
            finally:
                ended.set()

        future = self.start(note_end())
        try:
            while True:
                try:
                    return future.result(timeout=POLL_S)
                except TimeoutError:
                    if future.done():  # Just now, or the work itself ran out of time.
                        return future.result()
        except BaseException:
            future.cancel()
            ended.wait(END_DEADLINE_S)
            raise

    def cancel(self) -> None:
        """Cancel all work that other threads wait for: each wait raises CancelledError."""
        with self._starting:  # Work that has begun is in `_running` by then.
            running = list(self._running)
        for future in running:
            future.cancel()

    def close(self) -> None:
        """Cancel all work and end the thread."""

        async def cancel_all() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=END_DEADLINE_S / 2) if others else None

        self.cancel()
        if self._loop is not None and self._thread is not None:
            asyncio.run_coroutine_threadsafe(cancel_all(), self._loop).result(END_DEADLINE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(END_DEADLINE_S)
            if not self._thread.is_alive():
                self._loop.close()
            self._loop = None


async def gather_all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. The first failure cancels the others, waits for their ends, and is raised as it is."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def start_in_thread(call: Callable[[], T]) -> "Future[T]":
    """Begin a blocking call in a daemon thread of its own, which may outlive the wait for it.

    The threads of asyncio.to_thread and of an executor are few and keep the process from ending.
    """
    future: Future[T] = Future()
    # It is running: a wait that is cancelled leaves it as it is.
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            # A future does not take a StopIteration.
            future.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)

    threading.Thread(target=work, name="megarl-call", daemon=True).start()
    return future


async def call_in_thread(call: Callable[[], T]) -> T:
    """The result of a blocking call, which goes on where the wait for it is cancelled."""
    return await asyncio.wrap_future(start_in_thread(call))


class SGLangClient:
    """Client of one server. Thread-safe, but not for its loop's own thread; its coroutines are for that loop.

    Token ids are checked here: an id outside the vocabulary kills a server.
    """

    def __init__(
        self,
        url: str,
        *,
        vocab_size: int,
        deadline_s: float,
        api_key: str | None = None,
        loop: OnEventLoop | None = None,
    ):
        """deadline_s: of calls that name no other. api_key: where the server requires one. loop: None: its own."""
        self.url = url.rstrip("/")
        self._vocab_size = vocab_size
        self._deadline_s = deadline_s
        self._owns_loop, self._loop = loop is None, loop or OnEventLoop()
        self._calls: set[asyncio.Task[Any]] = set()
        """In flight, but for generation by coroutines"""
        # The servers are on this machine or in this cluster: a proxy from the environment does not apply.
        headers = {"Authorization": f"Bearer {api_key}"} if api_key is not None else {}
        self._http = httpx.AsyncClient(
            base_url=self.url,
            trust_env=False,
            headers=headers,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEP_ALIVE_S),
            timeout=httpx.Timeout(None, connect=CONNECT_DEADLINE_S),
        )

    def close(self) -> None:
        self._loop.run(self._http.aclose())
        if self._owns_loop:
            self._loop.close()

    def abort(self) -> None:
        """Break the calls in flight in other threads: each raises ConnectionLostError."""
        for call in list(self._calls):
            call.get_loop().call_soon_threadsafe(call.cancel)

    def generate(self, input_ids: Sequence[Sequence[int]], params: Any, **fields: Any) -> list[dict[str, Any]]:
        """SGLang's answers to a batch of prompts, in order; with `n` in params, n per prompt.

        Raises ValueError for an empty batch, an empty prompt or a token id outside the vocabulary.
        """
        check_token_ids(input_ids, self._vocab_size)
        body = {"input_ids": [list(ids) for ids in input_ids], "sampling_params": params, "stream": False}
        return list(self._call("/generate", body | fields))

    async def generate_batch(
        self, token_ids: Sequence[Sequence[int]], params: Sequence[Mapping[str, Any]], **fields: Any
    ) -> AsyncIterator[bytes]:
        """SGLang's answers to one batch of requests, each as JSON, in the order in which they are complete.

        The batch reaches SGLang's scheduler as a whole, so that it is computed alike whenever it is sent. An answer's
        place in the batch is its "index". Raises ValueError for an empty prompt or a token id outside the vocabulary,
        RequestError, ConnectionLostError, DeadlineError.
        """
        check_token_ids(token_ids, self._vocab_size)
        streamed = [{**each, "stream_interval": ONLY_AT_THE_END} for each in params]
        body = {"input_ids": [list(ids) for ids in token_ids], "sampling_params": streamed, "stream": True, **fields}
        is_done = False
        async with self._asking("POST", "/generate", body, self._deadline_s, "requests") as answer:
            # Up to its end, after which the next request may use the connection.
            async for line in _read_lines(answer):
                is_done = is_done or line == b"data: [DONE]"
                if line.startswith(b'data: {"error"'):
                    raise RequestError(f"{self.url}/generate: {line[6:].decode(errors='replace')[:2000]}")
                if line.startswith(b"data: ") and UNFINISHED not in line and not is_done:
                    yield line[6:]
        if not is_done:
            raise ConnectionLostError(f"{self.url}/generate: the answer ended before its last response")

    def flush_cache(self, wait_s: float = 30.0) -> None:
        """Drop all cached prefixes, once no request is left. Raises RequestError where some are left after `wait_s`."""
        self._call(f"/flush_cache?timeout={wait_s:g}", {})

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs (temperature 1) of token_ids[1:], each given the tokens before it; ahead of queued requests.

        Raises ValueError for fewer than two tokens.
        """
        if len(token_ids) < 2:
            raise ValueError(f"score: {len(token_ids)} token(s); at least two are needed")
        params = {"max_new_tokens": 0, "temperature": 1.0}
        fields = {"return_logprob": True, "logprob_start_len": 0, "priority": URGENT}
        (answer,) = self.generate([token_ids], params, **fields)
        entries = answer["meta_info"]["input_token_logprobs"]
        found = [entry[1] for entry in entries]
        # SGLang 0.5.23 scores the vocabulary's last id like any other but reports it as 0.
        if found != [0 if token == self._vocab_size - 1 else token for token in token_ids]:
            raise RequestError(f"{self.url}/generate scored the tokens {found}; {list(token_ids)} were sent")
        return [float(entry[0]) for entry in entries[1:]]

    def is_healthy(self, deadline_s: float = 20.0, *, generating: bool = False) -> bool:
        """Whether the server answers; with `generating`, whether it generates a token, which takes a second or more."""
        with contextlib.suppress(RequestError, ConnectionLostError, DeadlineError):
            self._call("/health_generate" if generating else "/health", deadline_s=deadline_s, method="GET")
            return True
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

    def pause(self) -> None:
        """Stop generating: running requests wait, and their KV cache is recomputed on resume."""
        self._call("/pause_generation", {"mode": "retract"})

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

    def _call(self, path: str, body: Any = None, deadline_s: float | None = None, *, method: str = "POST") -> Any:
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        try:
            answer = self._loop.run(self._ask(method, path, body, deadline_s))
        except CancelledError:
            raise ConnectionLostError(f"{self.url}{path} was broken off") from None
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        content = answer.json() if is_json else answer.text
        if isinstance(content, dict) and content.get("success") is False:
            raise RequestError(f"{self.url}{path} refused: {content.get('message')}")
        return content

    async def _ask(self, method: str, path: str, body: Any, deadline_s: float) -> httpx.Response:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        async with self._asking(method, path, body, deadline_s, "calls") as answer:
            await answer.aread()
            return answer

    @contextlib.asynccontextmanager
    async def _asking(
        self, method: str, path: str, body: Any, deadline_s: float, track: str
    ) -> AsyncIterator[httpx.Response]:
        """The answer to a request. Raises DeadlineError, ConnectionLostError and RequestError, which name it."""
        started = time.monotonic()
        try:
            with span(path.partition("?")[0], process=f"SGLang server {self.url}", track=track):
                async with asyncio.timeout(deadline_s), self._http.stream(method, path, json=body) as answer:
                    if answer.status_code != 200:
                        text = (await answer.aread()).decode(errors="replace")
                        raise RequestError(f"{self.url}{path} answered {answer.status_code}: {text[:2000]}")
                    yield answer
        except TimeoutError as error:
            raise DeadlineError(f"{self.url}{path} gave no answer within {deadline_s:g} s") from error
        except (httpx.TransportError, OSError) as error:
            lost_after = time.monotonic() - started
            raise ConnectionLostError(
                f"{self.url}{path}: {error or type(error).__name__} (after {lost_after:.1f} s)"
            ) from error


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


_left_over: WeakSet[Future[Any]] = WeakSet()
"""Abandoned calls; they may still be cleaning up on a server"""


def run_in_parallel(jobs: Sequence[Callable[[], T]], clients: Sequence[SGLangClient]) -> list[T]:
    """Run each job in a thread of its own; returns their results in order. clients: what the jobs call.

    The first failure, or an exception in the waiting thread (Stopped), is raised at once; the clients' calls in flight
    are broken then. A thread that still hangs (while it connects, say) does not keep the process from ending.
    """
    futures: list[Future[T]] = []
    try:
        for job in jobs:
            futures.append(start_in_thread(job))
        wait(futures, return_when=FIRST_EXCEPTION)
        return [future.result() for future in futures if future.done()]
    except BaseException:
        _left_over.update(futures)
        for client in clients:
            client.abort()
        raise


def wait_left_over(deadline_s: float) -> None:
    """Wait for the threads of abandoned calls; until they end, they may still call a server.

    Raises DeadlineError where one is still running after `deadline_s`.
    """
    if left := wait(list(_left_over), deadline_s).not_done:
        raise DeadlineError(f"{len(left)} abandoned calls to SGLang servers have not ended within {deadline_s:g} s")


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


LEAST_FREED = 64 << 20
"""Bytes; weights and KV cache of the smallest model take more"""


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
        self.measure: Callable[[], Sequence[int]] = list
        """Bytes that are free on the roles' GPUs, for the first release; empty: not known"""

    @property
    def has_released(self) -> bool:
        """Whether the servers cannot generate before the next weight sync."""
        return bool(self._released)

    def release(self) -> None:
        """Have the servers give back their memory, where they hold it; requests in flight are aborted.

        They then serve no version of the weights, so that nothing they generate before the next sync is used. A server
        that is lost has no memory either. Raises RequestError where a server is not idle, and where the first release
        has freed nothing, DeadlineError.
        """
        tags = [tag for tag in TAGS[self.offload] if tag not in self._released]

        def give_back(client: SGLangClient) -> None:
            with contextlib.suppress(ConnectionLostError):
                client.set_weight_version(UNPUBLISHED)
                # SGLang ends where it is not idle.
                client.abort_requests()
                client.flush_cache()
                client.release_memory(tags)

        if tags:
            self._released.update(tags)
            measure, self.measure = self.measure, list
            before = sum(measure())
            self._call_all(give_back)
            if before and (freed := sum(measure()) - before) < LEAST_FREED:
                raise RequestError(
                    f"the servers say that they gave memory back (rollout.offload), and {freed >> 20} MiB became free"
                    " on the roles' GPUs: torch_memory_saver does not hold it. Look into the servers' logs;"
                    " rollout.offload=null leaves the memory with them"
                )

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
