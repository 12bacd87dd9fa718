"""Instructions to the receivers in the servers' ranks, and their answers."""

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
from megarl.sync.receiver import INSTRUCTION

ANSWER_GRACE_S = 10.0
"""An answer may come this much after the server's own."""
MAX_ANSWER_BYTES = 1 << 28


class ReplyListener:
    """Takes the receivers' answers on a port of its own; each names the question that it answers."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._listener = socket.create_server((host, 0))
        self._condition = threading.Condition()
        self._found: dict[str, dict[str, Any]] = {}
        self._asked: set[str] = set()
        threading.Thread(target=self._listen, name="megarl-answers", daemon=True).start()

    def ask(self) -> dict[str, Any]:
        """What a receiver must know to answer one instruction."""
        token = secrets.token_hex(16)
        with self._condition:
            self._asked.add(token)
        return {"host": self._host, "port": self._listener.getsockname()[1], "token": token}

    def take(self, token: str, deadline_s: float) -> dict[str, Any] | None:
        """None where none has come within the deadline."""
        with self._condition:
            self._condition.wait_for(lambda: token in self._found, deadline_s)
            self._asked.discard(token)
            return self._found.pop(token, None)

    def drop(self, asked: Sequence[Mapping[str, Any]]) -> None:
        """Nobody waits for these answers any more."""
        with self._condition:
            for reply in asked:
                self._asked.discard(reply["token"])
                self._found.pop(reply["token"], None)

    def close(self) -> None:
        # Only a shutdown wakes a thread that waits in accept.
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
        """Whoever does not know a token that was asked for is not heard."""
        with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            connection.settimeout(ANSWER_GRACE_S)
            data = bytearray()
            while len(data) < MAX_ANSWER_BYTES and (part := connection.recv(1 << 16)):
                data += part
            answer = json.loads(bytes(data))
            with self._condition:
                if answer["token"] in self._asked:
                    self._found[answer["token"]] = answer
                    self._condition.notify_all()


def call_ranks(
    client: SGLangClient,
    answers: ReplyListener,
    verb: str,
    arguments: Sequence[Mapping[str, Any]],
    deadline_s: float,
    flush_cache: bool = False,
) -> list[Any]:
    """Have every rank of a server follow an instruction; their results. arguments: for each rank.

    Raises SyncError that names server, rank and verb where one fails or gives no answer, RequestError where the server
    refuses the call, and what the client raises of a server that is lost or late.
    """
    asked = [answers.ask() for _ in arguments]
    payloads = [
        encode_instruction({"verb": verb, "arguments": dict(own), "reply": reply})
        for own, reply in zip(arguments, asked, strict=True)
    ]
    end = time.monotonic() + deadline_s + ANSWER_GRACE_S
    try:
        client.update_weights_from_tensor(payloads, WEIGHT_LOADER, flush_cache=flush_cache, deadline_s=deadline_s)
    except BaseException:
        answers.drop(asked)
        raise
    results = []
    for rank, reply in enumerate(asked):
        answer = answers.take(reply["token"], max(0.0, end - time.monotonic()))
        if answer is None or "error" in answer:
            why = "gave no answer" if answer is None else f"answered: {answer['error']}"
            raise SyncError(f"SGLang server {client.url}, rank {rank}, asked to {verb} weights, {why}")
        results.append(answer["result"])
    return results


def encode_instruction(instruction: Mapping[str, Any]) -> str:
    """As SGLang takes tensors from other processes: pickled tensors in base64; here of the instruction's bytes."""
    data = torch.frombuffer(bytearray(json.dumps(instruction).encode()), dtype=torch.uint8)
    return base64.b64encode(pickle.dumps([(INSTRUCTION, data)])).decode()
