"""Generation over one or several SGLang servers, asked by coroutines on one event loop.

An answer of SGLang 0.5.23, which writes JSON without spaces, has each token twice, about 40 bytes:

{"output_ids": [ID, ...],
 "meta_info": {"finish_reason": {"type": "stop"}, "prompt_tokens": 5, "weight_version": "3",
               "weight_versions": [{"version": "3", "start": 0, "end": 7}],
               "output_token_logprobs": [[LOGPROB, ID, null], ...], "routed_experts": "BASE64"}}

What is as long as the response is cut out first and becomes arrays without a Python object per token.
"""

import asyncio
import base64
import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from megarl.config.errors import ConfigError
from megarl.config.schema.root import RolloutConfig
from megarl.interfaces import DeadlineError, TurnRequest
from megarl.models.architecture import Architecture
from megarl.models.checkpoint import load_tokenizer
from megarl.models.families import parse_architecture
from megarl.rollout.client import (
    URGENT,
    ConnectionLostError,
    OnEventLoop,
    RequestError,
    SGLangClient,
    call_in_thread,
    find_cause,
    gather_all,
)
from megarl.rollout.server import find_serving, find_stop_tokens, load_generation_spec, load_json
from megarl.types import FinishReason, Response, RoutedExperts, WeightVersions

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
            SGLangClient(
                url, vocab_size=spec.vocab_size, deadline_s=config.request_deadline_s, api_key=api_key, loop=self
            )
            for url in urls
        ]
        self._checkpoint, self._config = checkpoint, config
        self._architecture = load_expert_architecture(checkpoint) if config.router_replay else None
        self._shares_prefixes = not config.sglang.get("disable_radix_cache", config.router_replay)
        self._seed = seed
        self._check_processes = check_processes
        self.depends_on_batch = find_serving().depends_on_batch
        """Whether the last bits of a turn depend on what else its server computes at the same time; to repeat a turn
        exactly, the same batch must then be sent."""
        stop = find_stop_tokens(config, spec, self._tokenizer if config.stop else None)
        self._params = {"top_p": top_p, "top_k": top_k, "stop_token_ids": list(stop)}

    @property
    def num_servers(self) -> int:
        return len(self.clients)

    @property
    def num_slots(self) -> int:
        """Number of responses that the servers generate at once."""
        return self.num_servers * self._config.max_running_requests

    async def generate_turns(self, requests: Sequence[TurnRequest], take: Callable[[int, Response], None]) -> None:
        """Generate all turns, those of one server as one batch; `take(i, turn)` gets the i-th as soon as it is there.

        A request that is alone and whose server is lost goes to another. Raises ValueError for a turn without tokens
        before it or with an id outside the vocabulary; what `check_processes` raises for a server that is down, else
        ConnectionLostError where no server answers; DeadlineError.
        """
        try:
            if len(requests) == 1:
                await self._generate_one(requests, take)
                return
            shares = [[i for i, each in enumerate(requests) if each.server == n] for n in range(self.num_servers)]
            pairs = zip(self.clients, shares, strict=True)
            await gather_all(self._generate_share(client, requests, share, take) for client, share in pairs if share)
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
        for client in self.clients:
            client.close()
        super().close()

    async def _generate_one(self, requests: Sequence[TurnRequest], take: Callable[[int, Response], None]) -> None:
        """The one turn, by the server that is asked or, where its connection is lost, by the next."""
        clients = self.clients[requests[0].server :] + self.clients[: requests[0].server]
        for attempt in range(MAX_ATTEMPTS):
            await asyncio.sleep(ATTEMPT_PAUSE_S if attempt >= len(clients) else 0.0)
            try:
                return await self._generate_share(clients[attempt % len(clients)], requests, [0], take)
            except ConnectionLostError:
                if attempt == MAX_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    async def _generate_share(
        self,
        client: SGLangClient,
        requests: Sequence[TurnRequest],
        share: list[int],
        take: Callable[[int, Response], None],
    ) -> None:
        """The turns of one server, in as few calls as it takes well."""
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
        params = self._params | {"temperature": request.sampling.temperature, "max_new_tokens": request.max_new_tokens}
        if request.sampling.truncation is not None:
            params |= asdict(request.sampling.truncation)
        if request.name is None:
            return params
        return params | {"sampling_seed": compute_sampling_seed(f"{self._seed}/{request.name}")}

    def _build_fields(self, request: TurnRequest) -> dict[str, Any]:
        experts = {"return_routed_experts": True} if self._replays_experts(request) else {}
        return {"return_logprob": True} | experts | ({"priority": URGENT} if request.sampling.urgent else {})

    def _replays_experts(self, request: TurnRequest) -> bool:
        # Evaluations, which alone are urgent, are not learned from.
        return self._architecture is not None and not request.sampling.urgent

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


_LONG = re.compile(rb'"(output_ids|output_token_logprobs|routed_experts)":([\["])')
_LARGEST_ID = np.iinfo(np.int32).max


@dataclass(frozen=True, eq=False)
class Answer:
    """The answer to one prompt."""

    response: Response
    """One turn of at least one token"""
    num_prompt_tokens: int
    index: int
    """Place of the prompt in its call, in a streamed answer to several prompts; else 0"""


def parse_answer(raw: bytes, decode: Callable[[NDArray[np.int32]], str], arch: Architecture | None = None) -> Answer:
    """The answer to one prompt: one JSON object.

    decode: the text of tokens, which servers do not send. arch: of the model whose routed experts the answer has; None:
    it has none. Raises RequestError for an answer that was aborted, is inconsistent or cannot be read.
    """
    answer, cut = _cut_out(raw)
    try:
        meta = answer["meta_info"]
        reason, num_prompt_tokens = meta["finish_reason"], meta["prompt_tokens"]
        if reason is None or reason["type"] not in ("stop", "length"):
            raise RequestError(f"a response ended with {reason}; stop or length was expected")
        ids, logprobs = _parse_tokens(cut[answer["output_ids"]], cut[meta["output_token_logprobs"]])
        versions = _find_versions(meta, len(ids))
        encoded = bytes(cut[meta["routed_experts"]]) if arch and meta.get("routed_experts") is not None else None
    except (KeyError, TypeError, IndexError, ValueError) as error:
        described = f"{type(error).__name__} {error}"
        raise RequestError(f"an answer is not what SGLang writes ({described}): {json.dumps(answer)[:500]}") from None
    try:
        experts = decode_answer(encoded, num_prompt_tokens + len(ids), arch) if arch else None
    except ValueError as error:
        raise RequestError(f"an answer of {len(ids)} tokens cannot be replayed: {error}") from None
    finish, generated = FinishReason[reason["type"]], np.ones(len(ids), dtype=np.bool_)
    response = Response(ids, decode(ids), logprobs, generated, versions, finish, experts)
    return Answer(response, num_prompt_tokens, answer.get("index", 0))


def _cut_out(raw: bytes) -> tuple[Any, list[memoryview]]:
    """The JSON value with the number of its piece in place of each long array or text, and the pieces."""
    view, pieces, rest, done = memoryview(raw), list[memoryview](), list[bytes](), 0
    while found := _LONG.search(raw, done):
        start = found.end()
        # No number has a quote: the next one is the text's end, or is behind the array.
        quote = raw.find(b'"', start)
        if found[2] == b'"':
            end = quote
        elif found[1] == b"output_ids":
            end = raw.find(b"]", start)
        elif raw[start : start + 1] == b"]":
            end = start
        else:
            end = raw.rfind(b"]]", start, quote if quote >= 0 else len(raw)) + 1
        if end < start:
            raise RequestError(f"an answer cannot be read: its {found[1].decode()} have no end")
        rest += [raw[done : start - 1], str(len(pieces)).encode()]
        pieces.append(view[start:end])
        done = end + 1
    try:
        return json.loads(b"".join([*rest, raw[done:]])), pieces
    except ValueError as error:
        raise RequestError(f"an answer of {len(raw)} bytes is not the JSON that SGLang writes: {error}") from None


def _parse_tokens(ids: memoryview, entries: memoryview) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """int32 [T] of ID,...,ID and float32 [T] of [LOGPROB,ID,null],...,[LOGPROB,ID,null] with the same ids."""
    expected = np.fromstring(ids.tobytes(), np.int64, sep=",") if ids else np.zeros(0, np.int64)
    logprobs, found = _parse_entries(entries)
    if not len(expected) or not np.array_equal(found, expected):
        raise RequestError(
            f"a response of {len(expected)} tokens came with {len(found)} log-probs, not of these tokens"
        )
    wrong = ~np.isfinite(logprobs) | (expected < 0) | (expected > _LARGEST_ID)
    if wrong.any():
        t = int(wrong.argmax())
        raise RequestError(f"a response of {len(expected)} tokens has id {expected[t]} with log-prob {logprobs[t]}")
    return expected.astype(np.int32), logprobs


def _parse_entries(entries: memoryview) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """The log-probs and ids."""
    commas = np.nonzero(np.frombuffer(entries, np.uint8) == ord(","))[0] if entries else np.zeros(0, np.int64)
    num = (len(commas) + 1) // 3
    if len(commas) != 3 * num - 1:
        return np.zeros(0, np.float32), np.zeros(0)
    # An Arrow array of texts has no gaps: those between the numbers are texts too, but null, which are not read.
    bounds = np.empty((num, 4), np.int32)
    bounds[0, 0], bounds[1:, 0] = 1, commas[2::3] + 2
    bounds[:, 1], bounds[:, 2], bounds[:, 3] = commas[0::3], commas[0::3] + 1, commas[1::3]
    if (bounds[:, 0] > bounds[:, 1]).any():
        raise ValueError("a log-prob is missing")
    num_texts = bounds.size - 1
    valid = bytes([0b01010101]) * (num_texts // 8 + 1)
    texts = pa.StringArray.from_buffers(
        num_texts, pa.py_buffer(bounds.reshape(-1)), pa.py_buffer(entries), pa.py_buffer(valid)
    )
    numbers = np.frombuffer(texts.cast(pa.float64()).buffers()[1], np.float64)[:num_texts]
    with np.errstate(over="ignore"):
        return numbers[0::4].astype(np.float32), numbers[2::4]


def _find_versions(meta: Mapping[str, Any], length: int) -> WeightVersions:
    """SGLang's spans {version, start, end}, which must cover the response."""
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": length}]
    bounds = [(span["start"], span["end"]) for span in spans]
    starts, ends = [*(start for start, _ in bounds), length], [0, *(end for _, end in bounds)]
    if starts != ends or ends != sorted(ends):
        raise RequestError(f"weight versions {spans} do not cover a response of {length} tokens")
    filled = [(int(span["version"]), span["end"]) for span in spans if span["start"] < span["end"]]
    runs = [list(run) for _, run in groupby(filled, key=lambda each: each[0])]
    return WeightVersions(tuple(run[0][0] for run in runs), tuple(run[-1][1] for run in runs))


def load_expert_architecture(checkpoint: Path) -> Architecture:
    """The architecture of a checkpoint directory. Raises ConfigError where the model has no experts."""
    path = checkpoint / "config.json"
    try:
        arch = parse_architecture(load_json(path), path)
    except ValueError as error:
        raise ConfigError([f"model.path: {error}"]) from error
    if arch.experts is None:
        raise ConfigError([f"rollout.router_replay: found true, but the model of {checkpoint} has no experts"])
    return arch


def decode_answer(encoded: str | bytes | None, num_tokens: int, arch: Architecture) -> RoutedExperts:
    """SGLang's routed_experts: base64 of int32 [num_tokens - 1, layers, experts of a token].

    num_tokens: of prompt and response. Raises ValueError for another number of them, and for what no router chooses: a
    number that is no expert's, or the same expert twice.
    """
    assert arch.experts is not None
    if encoded is None:
        raise ValueError("it has no routed_experts; the server needs --enable-return-routed-experts")
    top_k, num_experts = arch.experts.top_k, arch.experts.num_experts
    found = np.frombuffer(base64.b64decode(encoded), dtype=np.int32)
    expected = (num_tokens - 1, arch.num_layers, top_k)
    if found.size != np.prod(expected):
        raise ValueError(f"it has {found.size} routed experts; {' x '.join(map(str, expected))} were expected")
    routed = found.reshape(expected)[:, arch.experts.num_dense_layers :]
    # SGLang's own buffer begins as zeros, and it writes -1 for padding.
    if routed.size and not 0 <= routed.min() <= routed.max() < num_experts:
        raise ValueError(f"it has routed experts from {routed.min()} to {routed.max()} of {num_experts}")
    if top_k > 1 and bool((routed[..., 0] == routed[..., 1]).any()):
        raise ValueError("a token of it was routed to the same expert twice")
    data = found.astype(np.uint8 if num_experts < 256 else np.int16).tobytes()
    return RoutedExperts(data, arch.num_layers, top_k, num_experts)
