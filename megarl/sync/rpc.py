"""Remote calls to the receivers in the servers' ranks, and their answers."""

import base64
import contextlib
import json
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megarl.interfaces import SyncError
from megarl.rollout.client import SGLangClient
from megarl.rollout.server import WEIGHT_LOADER
from megarl.sync.receiver import REQUEST

ANSWER_GRACE_S = 10.0
"""How long after the server's own answer those of its ranks may arrive."""
MAX_ANSWER_BYTES = 1 << 28


class ReplyListener:
    """Collects the receivers' answers on a port of its own; each carries the token of its request."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._listener = socket.create_server((host, 0))
        self._condition = threading.Condition()
        self._found: dict[str, dict[str, Any]] = {}
        self._expected: set[str] = set()
        threading.Thread(target=self._listen, name="megarl-answers", daemon=True).start()

    def expect(self) -> dict[str, Any]:
        """Register one request; returns the address and token that its answer must use."""
        token = secrets.token_hex(16)
        with self._condition:
            self._expected.add(token)
        return {"host": self._host, "port": self._listener.getsockname()[1], "token": token}

    def wait(self, token: str, deadline_s: float) -> dict[str, Any] | None:
        """The answer to the request with this token; None where it does not arrive within the deadline."""
        with self._condition:
            self._condition.wait_for(lambda: token in self._found, deadline_s)
            self._expected.discard(token)
            return self._found.pop(token, None)

    def discard(self, addresses: Sequence[Mapping[str, Any]]) -> None:
        """Ignore the answers to these requests from now on."""
        with self._condition:
            for reply in addresses:
                self._expected.discard(reply["token"])
                self._found.pop(reply["token"], None)

    def close(self) -> None:
        # Only a shutdown wakes a thread that is blocked in accept.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        """Read one answer; without the token of a registered request it is ignored."""
        with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            connection.settimeout(ANSWER_GRACE_S)
            data = bytearray()
            while len(data) < MAX_ANSWER_BYTES and (part := connection.recv(1 << 16)):
                data += part
            answer = json.loads(bytes(data))
            with self._condition:
                if answer["token"] in self._expected:
                    self._found[answer["token"]] = answer
                    self._condition.notify_all()


def call_ranks(
    client: SGLangClient,
    listener: ReplyListener,
    verb: str,
    arguments: Sequence[Mapping[str, Any]],
    deadline_s: float,
    flush_cache: bool = False,
) -> list[Any]:
    """Have every rank of a server execute a verb; returns their results. arguments: of each rank.

    Raises SyncError that names server, rank and verb where one fails or gives no answer, RequestError where the server
    refuses the call, and what the client raises for a server that is lost or late.
    """
    addresses = [listener.expect() for _ in arguments]
    payloads = [
        encode_request({"verb": verb, "arguments": dict(own), "reply": reply})
        for own, reply in zip(arguments, addresses, strict=True)
    ]
    end = time.monotonic() + deadline_s + ANSWER_GRACE_S
    try:
        client.update_weights_from_tensor(payloads, WEIGHT_LOADER, flush_cache=flush_cache, deadline_s=deadline_s)
    except BaseException:
        listener.discard(addresses)
        raise
    results = []
    for rank, reply in enumerate(addresses):
        answer = listener.wait(reply["token"], max(0.0, end - time.monotonic()))
        if answer is None or "error" in answer:
            why = "gave no answer" if answer is None else f"answered: {answer['error']}"
            raise SyncError(f"SGLang server {client.url}, rank {rank}, asked to {verb} weights, {why}")
        results.append(answer["result"])
    return results


def encode_request(request: Mapping[str, Any]) -> str:
    """The request's bytes as SGLang takes tensors from other processes: a pickled uint8 tensor in base64."""
    data = torch.frombuffer(bytearray(json.dumps(request).encode()), dtype=torch.uint8)
    return base64.b64encode(pickle.dumps([(REQUEST, data)])).decode()
