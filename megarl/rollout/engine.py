"""Generation over one or several SGLang servers, behind the RolloutEngine seam."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megarl.config.rollout import RolloutConfig
from megarl.rollout.calls import StopFlag, find_cause, run_side_by_side
from megarl.rollout.checkpoint import load_generation_spec
from megarl.rollout.client import URGENT, ConnectionLostError, RequestError, SGLangClient, abort_all
from megarl.seams import DeadlineError
from megarl.types import FinishReason, Prompt, Response

MAX_ATTEMPTS = 3
"""Sends of one request before a lost connection becomes an error."""
ATTEMPT_PAUSE_S = 1.0
"""Waited before a server is tried again."""
MIN_SHARED_PREFIX = 32
"""Prompts from this length on are computed once before their responses are sampled."""
REQUEST_ROWS_PER_SLOT = 4
"""Responses asked for in one call, as a multiple of what a server runs at once."""


class SGLangEngine:
    """RolloutEngine over servers that hold the same weights.

    Each server gets whole groups, in one call where it can: SGLang then schedules them as one batch, which is
    fastest and makes a run repeat under the same seed.
    """

    def __init__(
        self,
        urls: Sequence[str],
        checkpoint: Path,
        config: RolloutConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        check_processes: Callable[[], None] | None = None,
        top_p: float = 1.0,
        top_k: int = -1,
    ):
        """check_processes: raises RuntimeError with exit status and log of a server that is down.

        top_p, top_k: sample from a truncated distribution, which rollout_logprobs are then not of; for evaluation.

        Raises ConfigError for a checkpoint without a vocabulary size or an end-of-sequence token.
        """
        if not urls:
            raise ValueError("SGLangEngine: no server urls")
        spec = load_generation_spec(checkpoint)
        self.clients = [
            SGLangClient(url, vocab_size=spec.vocab_size, deadline_s=config.request_deadline_s) for url in urls
        ]
        self._config = config
        self._stop_token_ids = spec.stop_token_ids
        self._tokenizer = tokenizer
        self._check_processes = check_processes
        self._top_p, self._top_k = top_p, top_k
        self._num_cancelled = 0

    def generate(
        self, prompts: Sequence[Prompt], *, num_responses: int, temperature: float, urgent: bool = False
    ) -> list[list[Response]]:
        """`num_responses` responses for each prompt, in the order of `prompts`. temperature 0 is greedy. Thread-safe.

        urgent: before what other threads have asked for without it, where servers have priorities (max_staleness > 0).

        rollout_logprobs are of the temperature-scaled distribution (of temperature 1 where it is 0). The
        end-of-sequence token is a response token like any other.

        Raises ValueError for a prompt without tokens or with an id outside the vocabulary; what `check_processes`
        raises of a server that is down, else ConnectionLostError where no server answers, DeadlineError. A signal
        that raises in this thread ends the wait and breaks the calls under way; so does `cancel`, by CancelledError.
        """
        if num_responses < 1 or temperature < 0:
            raise ValueError(f"generate: num_responses {num_responses} (>= 1), temperature {temperature} (>= 0)")
        if not prompts:
            return []
        fields: dict[str, Any] = {"return_logprob": True} | ({"priority": URGENT} if urgent else {})
        num_cancelled = self._num_cancelled
        params = {
            "temperature": temperature,
            "top_p": self._top_p,
            "top_k": self._top_k,
            "max_new_tokens": self._config.response_length,
            "stop_token_ids": list(self._stop_token_ids),
        }
        shares = [list(range(i, len(prompts), len(self.clients))) for i in range(len(self.clients))]
        jobs = [
            partial(self._generate_share, prompts, home, share, num_responses, params, fields)
            for home, share in enumerate(shares)
            if share
        ]
        try:
            parts = run_side_by_side(jobs, partial(abort_all, self.clients))
        except (ConnectionLostError, DeadlineError) as error:
            if self._num_cancelled > num_cancelled:
                raise CancelledError from error
            self._raise_cause(error)
            raise
        found = {row: group for part in parts for row, group in part.items()}
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
        """End the calls under way in other threads: each raises CancelledError. Later ones are as ever."""
        self._num_cancelled += 1
        abort_all(self.clients)

    def close(self) -> None:
        for client in self.clients:
            client.close()

    def _raise_cause(self, error: RuntimeError) -> None:
        cause = find_cause(self._check_processes)
        if cause is not None:
            raise cause from error

    def _generate_share(
        self,
        prompts: Sequence[Prompt],
        home: int,
        rows: list[int],
        num_responses: int,
        params: Mapping[str, Any],
        fields: Mapping[str, Any],
        stop: StopFlag,
    ) -> dict[int, list[Response]]:
        """The groups of these rows, by server `home` or, where it is lost, by the next."""
        slots = REQUEST_ROWS_PER_SLOT * self._config.max_running_requests
        step = max(1, slots // num_responses)
        found: dict[int, list[Response]] = {}
        for start in range(0, len(rows), step):
            chunk = rows[start : start + step]
            ids = [prompts[row].token_ids for row in chunk]
            shared = [prompt for prompt in ids if len(prompt) >= MIN_SHARED_PREFIX]
            if num_responses > 1 and shared:
                self._call(home, shared, {"max_new_tokens": 0, "temperature": 0.0}, fields, stop)
            repeated = [prompt for prompt in ids for _ in range(num_responses)]
            answers = self._call(home, repeated, params, fields, stop)
            if len(answers) != len(repeated):
                raise RequestError(f"asked a server for {len(repeated)} responses, got {len(answers)}")
            responses = self._build_responses(answers)
            for k, row in enumerate(chunk):
                found[row] = responses[k * num_responses : (k + 1) * num_responses]
        return found

    def _call(
        self,
        home: int,
        ids: Sequence[Sequence[int]],
        params: Mapping[str, Any],
        fields: Mapping[str, Any],
        stop: StopFlag,
    ) -> list[dict[str, Any]]:
        num_cancelled = self._num_cancelled
        for attempt in range(MAX_ATTEMPTS):
            stop.sleep(ATTEMPT_PAUSE_S if attempt >= len(self.clients) else 0.0)
            client = self.clients[(home + attempt) % len(self.clients)]
            try:
                return client.generate(ids, params, **fields)
            except ConnectionLostError:
                if attempt == MAX_ATTEMPTS - 1 or self._num_cancelled > num_cancelled:
                    raise
        raise AssertionError("unreachable")

    def _build_responses(self, answers: Sequence[Mapping[str, Any]]) -> list[Response]:
        texts = self._tokenizer.batch_decode([a["output_ids"] for a in answers], skip_special_tokens=True)
        return [build_response(answer, text) for answer, text in zip(answers, texts, strict=True)]


def build_response(answer: Mapping[str, Any], text: str) -> Response:
    """One answer of /generate as a Response. Raises RequestError for an aborted or inconsistent one."""
    meta = answer["meta_info"]
    ids = tuple(answer["output_ids"])
    entries = meta["output_token_logprobs"]
    reason = meta["finish_reason"]["type"]
    if reason not in FinishReason.__members__:
        raise RequestError(f"a response ended with {meta['finish_reason']}; stop or length were expected")
    if not ids or tuple(entry[1] for entry in entries) != ids:
        raise RequestError(f"a response of {len(ids)} tokens came with {len(entries)} log-probs of other tokens")
    return Response(
        token_ids=ids,
        text=text,
        rollout_logprobs=tuple(float(entry[0]) for entry in entries),
        generated=(True,) * len(ids),
        weight_versions=_expand_versions(meta, len(ids)),
        finish_reason=FinishReason[reason],
    )


def _expand_versions(meta: Mapping[str, Any], length: int) -> tuple[int, ...]:
    """SGLang's spans {version, start, end} as one number per token."""
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": length}]
    versions = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    if len(versions) != length:
        raise RequestError(f"weight versions {spans} do not cover a response of {length} tokens")
    return tuple(versions)
