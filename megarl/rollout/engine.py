"""Generation over one or several SGLang servers, asked by coroutines on an event loop in a thread of its own."""

import asyncio
import functools
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from megarl.config.schema.run import RolloutConfig
from megarl.interfaces import DeadlineError, TurnRequest
from megarl.models.checkpoint import load_tokenizer
from megarl.rollout.answers import load_expert_architecture, parse_answer
from megarl.rollout.client import URGENT, ConnectionLostError, RequestError, SGLangClient, find_cause
from megarl.rollout.server import find_serving, find_stop_tokens, load_generation_spec
from megarl.types import Response

T = TypeVar("T")

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
                self._thread = threading.Thread(target=_run, args=(self._loop,), name="megarl-rollout", daemon=True)
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
        future = self.start(_noting_end(work, ended))
        try:
            while True:
                try:
                    return future.result(timeout=POLL_S)
                except TimeoutError:
                    if future.done():  # The work itself ran out of time.
                        raise
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
        self.cancel()
        if self._loop is not None and self._thread is not None:
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(END_DEADLINE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(END_DEADLINE_S)
            self._loop = None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


async def _noting_end(work: Coroutine[Any, Any, T], ended: threading.Event) -> T:
    try:
        return await work
    finally:
        ended.set()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.wait(others, timeout=END_DEADLINE_S / 2) if others else None


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


async def call_in_thread(call: Callable[[], T]) -> T:
    """The result of a blocking call in a daemon thread of its own, which may outlive the wait for it.

    The threads of asyncio.to_thread are few and keep the process from ending.
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
    return await asyncio.wrap_future(future)


MAX_ATTEMPTS = 3
"""How often a request is sent before a lost connection becomes an error."""
ATTEMPT_PAUSE_S = 1.0
"""Pause before a server is tried again."""
MIN_SHARED_PREFIX = 8
"""Prompts of at least this many tokens are prefilled once before their responses are sampled."""
REQUEST_ROWS_PER_SLOT = 4
"""Responses per call, as a multiple of the number that a server runs at once"""


def compute_sampling_seed(name: str) -> int:
    """A seed of 63 bits, from the SHA-256 of the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1


class SGLangEngine(OnEventLoop):
    """Servers that hold the same weights.

    On a CPU, turns with a name are reproducible bit for bit where they are sent in the same batches to the same number
    of servers without cached prefixes: the last bits of a logit depend on the batch. On a GPU SGLang uses the seeds
    only with rollout.sglang.enable_deterministic_inference=true, and the bits then depend on no batch.

    rollout_logprobs are those of the temperature-scaled distribution (at temperature 1 where it is 0). The
    end-of-sequence token is a response token like any other.
    """

    def __init__(
        self,
        urls: Sequence[str],
        checkpoint: Path,
        config: RolloutConfig,
        *,
        seed: int = 0,
        check_processes: Callable[[], None] | None = None,
        api_key: str | None = None,
        top_p: float = 1.0,
        top_k: int = -1,
    ):
        """Arguments that need a word:

        seed: of the run, for turns with a name. check_processes: raises RuntimeError with exit status and log of a
        server that is down. api_key: the servers' key, where they require one. top_p, top_k: truncate the
        distribution that is sampled, not that of rollout_logprobs; for evaluation.

        Raises ConfigError for a checkpoint without a vocabulary size or an end-of-sequence token.
        """
        super().__init__()
        if not urls:
            raise ValueError("SGLangEngine: no server urls")
        spec = load_generation_spec(checkpoint)
        self.clients = [
            SGLangClient(url, vocab_size=spec.vocab_size, deadline_s=config.request_deadline_s, api_key=api_key)
            for url in urls
        ]
        self._checkpoint, self._config = checkpoint, config
        self._architecture = load_expert_architecture(checkpoint) if config.router_replay else None
        self._shares_prefixes = not config.sglang.get("disable_radix_cache", config.router_replay)
        self._seed = seed
        self._check_processes = check_processes
        stop = find_stop_tokens(config, spec, self._tokenizer if config.stop else None)
        self._params = {"top_p": top_p, "top_k": top_k, "stop_token_ids": list(stop)}

    @property
    def num_servers(self) -> int:
        return len(self.clients)

    @property
    def num_slots(self) -> int:
        """Number of responses that the servers generate at once."""
        return self.num_servers * self._config.max_running_requests

    @property
    def depends_on_batch(self) -> bool:
        """Whether the last bits of a turn depend on what else its server computes at the same time; to repeat a turn
        exactly, the same batch must then be sent.
        """
        return find_serving().depends_on_batch

    async def generate_turns(self, requests: Sequence[TurnRequest], take: Callable[[int, Response], None]) -> None:
        """Generate all turns, those of one server as one batch; `take(i, turn)` gets the i-th as soon as it is there.

        A request that is alone and whose server is lost goes to another. Raises ValueError for a turn without tokens
        before it or with an id outside the vocabulary; what `check_processes` raises for a server that is down, else
        ConnectionLostError where no server answers; DeadlineError.
        """
        try:
            if len(requests) == 1:
                take(0, await self._generate_one(requests[0]))
                return
            shares = [[i for i, each in enumerate(requests) if each.server == n] for n in range(self.num_servers)]
            await gather_all(self._generate_share(requests, share, take) for share in shares if share)
        except (ConnectionLostError, DeadlineError) as error:
            cause = await call_in_thread(lambda: find_cause(self._check_processes))
            if cause is not None:
                raise cause from error
            raise

    async def drop_cached_prefixes(self) -> None:
        """Have the servers forget what they have cached, once requests that a lost connection left are gone."""
        await gather_all(call_in_thread(client.flush_cache) for client in self.clients)

    def check_health(self) -> None:
        """Raise RuntimeError naming a server that is down, with its exit status and log where its process ended."""
        if self._check_processes is not None:
            self._check_processes()
        for client in self.clients:
            if not client.is_healthy():
                error = ConnectionLostError(f"SGLang server {client.url} does not answer /health")
                cause = find_cause(self._check_processes)
                raise cause or error from error

    def close(self) -> None:
        self.run(gather_all(client.close_generation() for client in self.clients))
        super().close()
        for client in self.clients:
            client.close()

    async def _generate_one(self, request: TurnRequest) -> Response:
        """One turn, by the server that is asked or, where its connection is lost, by the next."""
        clients = self.clients[request.server :] + self.clients[: request.server]
        ids, params = request.token_ids.tolist(), self._build_params(request)
        for attempt in range(MAX_ATTEMPTS):
            await asyncio.sleep(ATTEMPT_PAUSE_S if attempt >= len(clients) else 0.0)
            try:
                client = clients[attempt % len(clients)]
                raw = await client.generate_turn(ids, params, **self._build_fields(request))
                return self._read(raw, [request])[1]
            except ConnectionLostError:
                if attempt == MAX_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    async def _generate_share(
        self, requests: Sequence[TurnRequest], share: list[int], take: Callable[[int, Response], None]
    ) -> None:
        """The turns of one server, in as few calls as it takes well."""
        client = self.clients[requests[share[0]].server]
        step = REQUEST_ROWS_PER_SLOT * self._config.max_running_requests
        for start in range(0, len(share), step):
            rows = share[start : start + step]
            ids = [requests[row].token_ids.tolist() for row in rows]
            fields = self._build_fields(requests[rows[0]])
            await self._prefill_shared(client, ids, fields)
            params = [self._build_params(requests[row]) for row in rows]
            answered = set()
            async for answer in client.generate_batch(ids, params, **fields):
                index, response = self._read(answer, [requests[row] for row in rows])
                answered.add(index)
                take(rows[index], response)
            if len(answered) != len(rows):
                raise RequestError(f"asked {client.url} for {len(rows)} responses, got {len(answered)}")

    async def _prefill_shared(self, client: SGLangClient, ids: Sequence[list[int]], fields: Mapping[str, Any]) -> None:
        """Compute prompts that several requests have once, so that the responses find them in the server's cache."""
        if not self._shares_prefixes:
            return
        counts = Counter(tuple(each) for each in ids if len(each) >= MIN_SHARED_PREFIX)
        shared = [list(prompt) for prompt, count in counts.items() if count > 1]
        if shared:
            params = [{"max_new_tokens": 0, "temperature": 0.0}] * len(shared)
            async for _ in client.generate_batch(shared, params, **fields):
                pass

    def _build_params(self, request: TurnRequest) -> dict[str, Any]:
        """SGLang's sampling_params of one request."""
        params = self._params | {"temperature": request.temperature, "max_new_tokens": request.max_new_tokens}
        if request.truncation is not None:
            params |= asdict(request.truncation)
        if request.name is None:
            return params
        return params | {"sampling_seed": compute_sampling_seed(f"{self._seed}/{request.name}")}

    def _build_fields(self, request: TurnRequest) -> dict[str, Any]:
        fields: dict[str, Any] = {"return_logprob": True}
        if self._replays_experts(request):
            fields["return_routed_experts"] = True
        return fields | ({"priority": URGENT} if request.urgent else {})

    def _replays_experts(self, request: TurnRequest) -> bool:
        # Evaluations, which alone are urgent, are not learned from.
        return self._architecture is not None and not request.urgent

    def _read(self, raw: bytes, batch: Sequence[TurnRequest]) -> tuple[int, Response]:
        """The answer's index in its batch, and the turn. Raises RequestError where it continues other tokens."""
        # The requests of a batch are alike.
        architecture = self._architecture if self._replays_experts(batch[0]) else None
        answer = parse_answer(raw, lambda ids: str(self._tokenizer.decode(ids, skip_special_tokens=True)), architecture)
        num_sent = len(batch[answer.index].token_ids)
        if answer.num_prompt_tokens != num_sent:
            raise RequestError(f"a turn after {num_sent} tokens was generated after {answer.num_prompt_tokens}")
        return answer.index, answer.response

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._checkpoint)
