"""Generation over one or several SGLang servers; implements the RolloutEngine interface."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.config.schema.rollout import RolloutConfig
from megarl.families.architecture import Architecture
from megarl.interfaces import DeadlineError
from megarl.rollout.calls import StopFlag, find_cause, run_in_parallel
from megarl.rollout.client import URGENT, ConnectionLostError, RequestError, SGLangClient, abort_all
from megarl.rollout.routed_experts import decode_answer, load_expert_architecture
from megarl.rollout.served_model import load_generation_spec
from megarl.types import FinishReason, Prompt, Response

T = TypeVar("T")

MAX_ATTEMPTS = 3
"""How often a request is sent before a lost connection becomes an error."""
ATTEMPT_PAUSE_S = 1.0
"""Pause before a server is tried again."""
MIN_SHARED_PREFIX = 32
"""Prompts of at least this many tokens are prefilled once before their responses are sampled."""
REQUEST_ROWS_PER_SLOT = 4
"""Responses per call, as a multiple of the number that a server runs at once"""


Params = Mapping[str, Any]
"""SGLang's `sampling_params` of one request"""
Answers = list[dict[str, Any]]
"""SGLang's answers to one call"""


@dataclass(frozen=True)
class Request:
    """The arguments of one call of `generate`."""

    prompts: Sequence[Prompt]
    num_responses: int
    params: Params
    urgent: bool
    key: str | None
    """Identifies the run and the call; None: random numbers are the server's"""
    with_routed_experts: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        fields = {"return_logprob": True} | ({"return_routed_experts": True} if self.with_routed_experts else {})
        return fields | ({"priority": URGENT} if self.urgent else {})

    def build_params(self, row: int, k: int) -> Params:
        """SGLang's sampling_params of the k-th response to the row-th prompt."""
        if self.key is None:
            return self.params
        return {**self.params, "sampling_seed": compute_sampling_seed(f"{self.key}/{row}/{k}")}


def compute_sampling_seed(name: str) -> int:
    """A seed of 63 bits, from the SHA-256 of the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1


class SGLangEngine:
    """A RolloutEngine over servers that hold the same weights.

    Each server gets whole groups, in one call where possible: SGLang then schedules them as one batch, which is
    fastest and makes a run reproducible under the same seed.

    On a CPU, calls with a key are reproducible bit for bit, whatever came before them and whichever process answers,
    where nothing else runs on the servers (max_staleness 0) and their number is the same: the last bits of a logit
    depend on the batch. On a GPU SGLang uses the seeds only with rollout.sglang.enable_deterministic_inference=true.
    """

    def __init__(
        self,
        urls: Sequence[str],
        checkpoint: Path,
        config: RolloutConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int = 0,
        check_processes: Callable[[], None] | None = None,
        api_key: str | None = None,
        top_p: float = 1.0,
        top_k: int = -1,
    ):
        """Arguments that need a word:

        seed: of the run, for calls with a key. check_processes: raises RuntimeError with exit status and log of a
        server that is down. api_key: the servers' key, where they require one. top_p, top_k: truncate the
        distribution that is sampled, not that of rollout_logprobs; for evaluation.

        Raises ConfigError for a checkpoint without a vocabulary size or an end-of-sequence token.
        """
        if not urls:
            raise ValueError("SGLangEngine: no server urls")
        spec = load_generation_spec(checkpoint)
        self.clients = [
            SGLangClient(url, vocab_size=spec.vocab_size, deadline_s=config.request_deadline_s, api_key=api_key)
            for url in urls
        ]
        self._config = config
        self._architecture = load_expert_architecture(checkpoint) if config.router_replay else None
        self._shares_prefixes = not config.sglang.get("disable_radix_cache", config.router_replay)
        self._stop_token_ids = spec.stop_token_ids
        self._tokenizer = tokenizer
        self._seed = seed
        self._check_processes = check_processes
        self._top_p, self._top_k = top_p, top_k
        self._num_cancelled = 0

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_responses: int,
        temperature: float,
        urgent: bool = False,
        key: str | None = None,
    ) -> list[list[Response]]:
        """`num_responses` responses for each prompt, in the order of `prompts`. temperature 0 is greedy. Thread-safe.

        urgent: ahead of other threads' calls that are not, where servers schedule by priority (max_staleness > 0).

        key: seeds each response by the run's seed, the key, its prompt's index in `prompts` and its index in the
        group. With max_staleness 0 servers also drop their cached prefixes first, and a lost server's share is not
        moved to another server, which would have to compute both shares at once.

        rollout_logprobs are those of the temperature-scaled distribution (at temperature 1 where it is 0). The
        end-of-sequence token is a response token like any other.

        Raises ValueError for a prompt without tokens or with an id outside the vocabulary; what `check_processes`
        raises for a server that is down, else ConnectionLostError where no server answers; DeadlineError. A signal
        that raises in this thread ends the wait and breaks the calls in flight; so does `cancel`, by CancelledError.
        """
        if num_responses < 1 or temperature < 0:
            raise ValueError(f"generate: num_responses {num_responses} (>= 1), temperature {temperature} (>= 0)")
        if not prompts:
            return []
        params = {
            "temperature": temperature,
            "top_p": self._top_p,
            "top_k": self._top_k,
            "max_new_tokens": self._config.response_length,
            "stop_token_ids": list(self._stop_token_ids),
        }
        name = None if key is None else f"{self._seed}/{key}"
        # Evaluations, which alone are urgent, are not learned from.
        request = Request(prompts, num_responses, params, urgent, name, self._architecture is not None and not urgent)
        shares = [list(range(i, len(prompts), len(self.clients))) for i in range(len(self.clients))]
        jobs = [partial(self._generate_share, request, home, share) for home, share in enumerate(shares) if share]
        found = {row: group for part in self._run(jobs) for row, group in part.items()}
        return [found[row] for row in range(len(prompts))]

    def check_health(self) -> None:
        """Raise RuntimeError naming a server that is down, with its exit status and log where its process ended."""
        if self._check_processes is not None:
            self._check_processes()
        for client in self.clients:
            if not client.is_healthy():
                error = ConnectionLostError(f"SGLang server {client.url} does not answer /health")
                self._raise_cause(error)
                raise error

    def cancel(self) -> None:
        """End the calls in flight in other threads: each raises CancelledError. Later calls are not affected."""
        self._num_cancelled += 1
        abort_all(self.clients)

    def close(self) -> None:
        for client in self.clients:
            client.close()

    def _run(self, jobs: Sequence[Callable[[StopFlag], T]]) -> list[T]:
        num_cancelled = self._num_cancelled
        try:
            return run_in_parallel(jobs, partial(abort_all, self.clients))
        except (ConnectionLostError, DeadlineError) as error:
            if self._num_cancelled > num_cancelled:
                raise CancelledError from error
            self._raise_cause(error)
            raise

    def _raise_cause(self, error: RuntimeError) -> None:
        cause = find_cause(self._check_processes)
        if cause is not None:
            raise cause from error

    def _generate_share(
        self, request: Request, home: int, rows: list[int], stop: StopFlag
    ) -> dict[int, list[Response]]:
        """Generate the groups of these rows on server `home`.

        Where it is lost, another takes over, unless there is a key and max_staleness is 0.
        """
        clients = self.clients[home:] + self.clients[:home]

        def send_to_any(ids: Sequence[Sequence[int]], params: Sequence[Params]) -> Answers:
            return self._attempt(clients, lambda client: client.generate(ids, params, **request.fields), stop)

        def generate_uncached(client: SGLangClient) -> dict[int, list[Response]]:
            def send(ids: Sequence[Sequence[int]], params: Sequence[Params]) -> Answers:
                stop.check()
                return client.generate(ids, params, **request.fields)

            # Wait for requests left by a lost connection, so that nothing else runs and nothing is cached.
            client.flush_cache()
            return self._generate_rows(request, rows, send)

        if request.key is None or self._config.max_staleness > 0:
            return self._generate_rows(request, rows, send_to_any)
        return self._attempt(clients[:1], generate_uncached, stop)

    def _generate_rows(
        self,
        request: Request,
        rows: list[int],
        send: Callable[[Sequence[Sequence[int]], Sequence[Params]], Answers],
    ) -> dict[int, list[Response]]:
        slots = REQUEST_ROWS_PER_SLOT * self._config.max_running_requests
        n = request.num_responses
        step = max(1, slots // n)
        found: dict[int, list[Response]] = {}
        for start in range(0, len(rows), step):
            chunk = rows[start : start + step]
            ids = [request.prompts[row].token_ids for row in chunk]
            shared = [prompt for prompt in ids if len(prompt) >= MIN_SHARED_PREFIX]
            if n > 1 and shared and self._shares_prefixes:
                send(shared, [{"max_new_tokens": 0, "temperature": 0.0}] * len(shared))
            params = [request.build_params(row, k) for row in chunk for k in range(n)]
            answers = send([prompt for prompt in ids for _ in range(n)], params)
            if len(answers) != len(params):
                raise RequestError(f"asked a server for {len(params)} responses, got {len(answers)}")
            responses = self._build_responses(answers, request)
            found |= {row: responses[i * n : (i + 1) * n] for i, row in enumerate(chunk)}
        return found

    def _attempt(self, clients: Sequence[SGLangClient], ask: Callable[[SGLangClient], T], stop: StopFlag) -> T:
        """The result of `ask` on the first client or, where its connection is lost, on the next."""
        num_cancelled = self._num_cancelled
        for attempt in range(MAX_ATTEMPTS):
            stop.sleep(ATTEMPT_PAUSE_S if attempt >= len(clients) else 0.0)
            try:
                return ask(clients[attempt % len(clients)])
            except ConnectionLostError:
                if attempt == MAX_ATTEMPTS - 1 or self._num_cancelled > num_cancelled:
                    raise
        raise AssertionError("unreachable")

    def _build_responses(self, answers: Sequence[Mapping[str, Any]], request: Request) -> list[Response]:
        texts = self._tokenizer.batch_decode([a["output_ids"] for a in answers], skip_special_tokens=True)
        arch = self._architecture if request.with_routed_experts else None
        return [build_response(answer, text, arch) for answer, text in zip(answers, texts, strict=True)]


def build_response(answer: Mapping[str, Any], text: str, arch: Architecture | None = None) -> Response:
    """One answer of /generate as a Response. Raises RequestError for an aborted or inconsistent one.

    arch: of the model whose routed experts the answer has; None: it has none.
    """
    meta = answer["meta_info"]
    ids = tuple(answer["output_ids"])
    entries = meta["output_token_logprobs"]
    reason = meta["finish_reason"]["type"]
    if reason not in FinishReason.__members__:
        raise RequestError(f"a response ended with {meta['finish_reason']}; stop or length was expected")
    if not ids or tuple(entry[1] for entry in entries) != ids:
        raise RequestError(f"a response of {len(ids)} tokens came with {len(entries)} log-probs, not of these tokens")
    experts = None
    try:
        if arch is not None:
            experts = decode_answer(meta.get("routed_experts"), meta["prompt_tokens"] + len(ids), arch)
    except ValueError as error:
        raise RequestError(f"an answer of {len(ids)} tokens cannot be replayed: {error}") from None
    return Response(
        token_ids=ids,
        text=text,
        rollout_logprobs=[float(entry[0]) for entry in entries],
        generated=np.ones(len(ids), dtype=np.bool_),
        weight_versions=_expand_versions(meta, len(ids)),
        finish_reason=FinishReason[reason],
        routed_experts=experts,
    )


def _expand_versions(meta: Mapping[str, Any], length: int) -> tuple[int, ...]:
    """SGLang's spans {version, start, end} as one weight version per token."""
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": length}]
    versions = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    if len(versions) != length:
        raise RequestError(f"weight versions {spans} do not cover a response of {length} tokens")
    return tuple(versions)
