"""HTTP client of one SGLang server: every call has a deadline, and an error names the server and the call."""

import contextlib
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx

from megarl.interfaces import DeadlineError
from megarl.timeline import span

CONNECT_DEADLINE_S = 10.0
URGENT = 100
"""Priority of a request that preempts those without one, where the server schedules by priority"""


class RequestError(RuntimeError):
    """A server answered with an error; the message has the server, the path, the status and the body."""


class ConnectionLostError(RuntimeError):
    """A server could not be reached or ended before it answered; the request may be sent again."""


class SGLangClient:
    """Client of one server. Thread-safe.

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
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def close(self) -> None:
        self._http.close()

    def abort(self) -> None:
        """Break the calls in flight in other threads: each raises ConnectionLostError. Later calls reconnect."""
        # Only a shutdown wakes a thread that is blocked in recv; closing a socket does not.
        for each in list(self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def generate(
        self,
        input_ids: Sequence[Sequence[int]],
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        deadline_s: float | None = None,
        **fields: Any,
    ) -> list[dict[str, Any]]:
        """SGLang's answers to a batch of prompts, in order; with `n` in sampling_params, n per prompt.

        Raises ValueError for an empty batch, an empty prompt or a token id outside the vocabulary.
        """
        check_token_ids(input_ids, self._vocab_size)
        params = dict(sampling_params) if isinstance(sampling_params, Mapping) else list(sampling_params)
        body = {"input_ids": [list(ids) for ids in input_ids], "sampling_params": params, "stream": False}
        answers = self._post("/generate", body | fields, deadline_s)
        if not isinstance(answers, list):
            raise RequestError(f"{self.url}/generate answered with a {type(answers).__name__}; a list was expected")
        return answers

    def flush_cache(self, wait_s: float = 30.0) -> None:
        """Drop all cached prefixes, once no request is left. Raises RequestError where some are left after `wait_s`."""
        self._post(f"/flush_cache?timeout={wait_s:g}", None, None)

    def score(self, token_ids: Sequence[int], *, deadline_s: float | None = None) -> list[float]:
        """Log-probs (temperature 1) of token_ids[1:], each given the tokens before it; ahead of queued requests.

        Raises ValueError for fewer than two tokens.
        """
        if len(token_ids) < 2:
            raise ValueError(f"score: {len(token_ids)} token(s); at least two are needed")
        params = {"max_new_tokens": 0, "temperature": 1.0}
        fields = {"return_logprob": True, "logprob_start_len": 0, "priority": URGENT}
        answer = self.generate([token_ids], params, deadline_s=deadline_s, **fields)[0]
        entries = answer["meta_info"]["input_token_logprobs"]
        found = [entry[1] for entry in entries]
        # SGLang 0.5.23 scores the vocabulary's last id like any other but reports it as 0.
        if found != [0 if token == self._vocab_size - 1 else token for token in token_ids]:
            raise RequestError(f"{self.url}/generate scored the tokens {found}; {list(token_ids)} were sent")
        return [float(entry[0]) for entry in entries[1:]]

    def is_healthy(self, deadline_s: float = 20.0, *, generating: bool = False) -> bool:
        """Whether the server answers; with `generating`, whether it generates a token, which takes a second or more."""
        path = "/health_generate" if generating else "/health"
        try:
            return self._http.get(path, timeout=deadline_s).status_code == 200
        except httpx.HTTPError:
            return False

    def load_model_info(self) -> dict[str, Any]:
        return dict(self._call("GET", "/model_info", None, None))

    def load_weight_version(self) -> int:
        """The weight version that the server reports. Raises RequestError where it is not a number."""
        reported = self.load_model_info()["weight_version"]
        try:
            return int(reported)
        except ValueError:
            raise RequestError(f"{self.url} reports weight version {reported!r}; a number was expected") from None

    def set_weight_version(self, version: int, *, deadline_s: float | None = None) -> None:
        """Label tokens generated from now on with `version`; earlier tokens of requests in flight keep theirs."""
        self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False}, deadline_s)

    def pause(self, mode: str = "retract") -> None:
        """Stop generating. Mode retract: running requests wait, and their KV cache is recomputed on resume."""
        self._post("/pause_generation", {"mode": mode}, None)

    def resume(self, *, deadline_s: float | None = None) -> None:
        self._post("/continue_generation", {}, deadline_s)

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
        self._post("/abort_request", {"abort_all": True}, None)

    def release_memory(self, tags: Sequence[str]) -> None:
        """Give memory of the GPU back: of the KV cache, of the weights. The server must be idle."""
        self._post("/release_memory_occupation", {"tags": list(tags)}, None)

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Take memory again that was given back."""
        self._post("/resume_memory_occupation", {"tags": list(tags)}, None)

    def load_memory_use(self) -> dict[str, float]:
        """GiB of `weights` and of `kv_cache` on each of the server's GPUs, as SGLang counted them at its start."""
        found = self._call("GET", "/server_info", None, None)["internal_states"][0]["memory_usage"]
        return {"weights": float(found["weight"]), "kv_cache": float(found["kvcache"])}

    def begin_update(self) -> None:
        self._post("/begin_weight_update", {}, None)

    def end_update(self, *, deadline_s: float | None = None) -> None:
        self._post("/end_weight_update", {}, deadline_s)

    def update_weights_from_disk(self, directory: Path, *, deadline_s: float | None = None) -> None:
        """Load a Hugging Face checkpoint directory into the running model and drop cached prefixes."""
        body = {"model_path": str(directory), "flush_cache": True}
        self._post("/update_weights_from_disk", body, deadline_s)

    def update_weights_from_tensor(
        self, payloads: Sequence[str], load_format: str, *, flush_cache: bool, deadline_s: float | None = None
    ) -> None:
        """Pass every rank of the server its payload, for the loader `load_format`; within a weight update."""
        body = {"serialized_named_tensors": list(payloads), "load_format": load_format, "flush_cache": flush_cache}
        self._post("/update_weights_from_tensor", body, deadline_s)

    def load_checksums(self) -> list[dict[str, str]]:
        """For each rank: 16 hex digits by SGLang's tensor name, on a CPU of SHA-256 over the raw bytes."""
        answer = self._post("/weights_checker", {"action": "checksum"}, None)
        return [dict(rank["checksums"]) for rank in answer["ranks"]]

    def _post(self, path: str, body: Mapping[str, Any] | None, deadline_s: float | None) -> Any:
        return self._call("POST", path, body, deadline_s)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float | None) -> Any:
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        timeout = httpx.Timeout(deadline_s, connect=min(CONNECT_DEADLINE_S, deadline_s))
        started = time.monotonic()
        try:
            with span(path.partition("?")[0], process=f"SGLang server {self.url}", track="calls"):
                answer = self._http.request(
                    method, path, json=body, timeout=timeout, extensions={"trace": self._remember_socket}
                )
        except httpx.ReadTimeout as error:
            raise DeadlineError(f"{self.url}{path} gave no answer within {deadline_s:g} s") from error
        except (httpx.TransportError, OSError) as error:
            lost_after = time.monotonic() - started
            raise ConnectionLostError(f"{self.url}{path}: {error} (after {lost_after:.1f} s)") from error
        if answer.status_code == 404:
            raise RequestError(
                f"{self.url}{path} answered 404: the server, SGLang {self._find_version()}, does not know this call;"
                f" megarl expects SGLang {metadata.version('sglang')}"
            )
        if answer.status_code != 200:
            raise RequestError(f"{self.url}{path} answered {answer.status_code}: {answer.text[:2000]}")
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        content = answer.json() if is_json else answer.text
        if isinstance(content, dict) and content.get("success") is False:
            raise RequestError(f"{self.url}{path} refused: {content.get('message')}")
        return content

    def _find_version(self) -> str:
        """The SGLang version that the server reports."""
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
            return str(self._http.get("/server_info", timeout=CONNECT_DEADLINE_S).json()["version"])
        return "of unknown version"

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


def abort_all(clients: Sequence[SGLangClient]) -> None:
    """Call `abort` of each client."""
    for client in clients:
        client.abort()
