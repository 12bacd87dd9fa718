"""The receiving end of the weight sync inside each rank of an SGLang server.

SGLang calls `receive` as a custom weight loader (--custom-weight-loader) through /update_weights_from_tensor, with a
request in JSON in place of weights. The answer goes to the address that the request names. Nothing here raises:
an exception would end the server. Imports neither Megatron nor Ray nor SGLang.
"""

import json
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megarl.sync.plan import Bucket, decode_bucket, empty_bucket, sum_checksums
from megarl.sync.transport import BucketTransport, find_node, open_transport

REQUEST = "megarl"
REPLY_DEADLINE_S = 30.0


class _Receiver:
    """What this rank keeps between requests."""

    def __init__(self) -> None:
        self.transport: BucketTransport | None = None
        self.buckets: list[Bucket] = []
        self.words: dict[str, int] = {}
        self.rank = -1

    def locate(self, tensors: Mapping[str, Tensor]) -> str:
        """The node (`find_node`)."""
        return find_node()

    def describe(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """The shape and dtype of each tensor, by name."""
        return {name: [list(x.shape), str(x.dtype).removeprefix("torch.")] for name, x in tensors.items()}

    def prepare(self, tensors: Mapping[str, Tensor], rank: int, buckets: list[Any], words: dict[str, int]) -> None:
        self.rank, self.words = rank, words
        self.buckets = [decode_bucket(bucket) for bucket in buckets]

    def open(self, tensors: Mapping[str, Tensor], transport: dict[str, Any]) -> None:
        self._close()
        self.transport = open_transport(
            transport,
            self.rank,
            is_source=False,
            device=next(iter(tensors.values())).device,
            peers={bucket.source for bucket in self.buckets},
        )

    def receive(self, tensors: Mapping[str, Tensor]) -> int:
        """Receive all buckets; returns the number of bytes.

        tensors: looked up for this sync, since a server may have given its memory back in between.
        """
        assert self.transport is not None, "receive was called before open"
        try:
            self.transport.receive(self.buckets, lambda bucket, message: empty_bucket(bucket, message, tensors))
        except BaseException:
            # Ranks that wait for this one then learn of it at once.
            self._close()
            raise
        return sum(copy.num_bytes for bucket in self.buckets for copy in bucket.copies)

    def checksum(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """The checksums of what the model holds now, whatever was received."""
        words = {(self.rank, name): word for name, word in self.words.items()}
        sums = sum_checksums(self.buckets, words, lambda copy: copy.target.of(tensors[copy.target_tensor]))
        return {name: value for (_, name), value in sums.items()}

    def _close(self) -> None:
        if self.transport is not None:
            self.transport.close()
            self.transport = None


_RECEIVER = _Receiver()
VERBS: dict[str, Callable[..., Any]] = {
    name: getattr(_RECEIVER, name) for name in ("locate", "describe", "prepare", "open", "receive", "checksum")
}


def receive(model: torch.nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """SGLang's custom weight loader: executes one request and answers it."""
    try:
        request = json.loads(bytes(dict(named_tensors)[REQUEST].cpu().tolist()))
    except Exception as error:
        print(f"megarl: a request could not be read: {error!r}", flush=True)
        return
    answer: dict[str, Any]
    try:
        tensors = {name: param.data for name, param in model.named_parameters()}
        with torch.no_grad():
            answer = {"result": VERBS[request["verb"]](tensors, **request["arguments"])}
    except Exception as error:
        print(f"megarl: {request.get('verb')} failed: {error!r}", flush=True)
        answer = {"error": f"{type(error).__name__}: {error}"}
    try:
        reply = request["reply"]
        with socket.create_connection((reply["host"], reply["port"]), timeout=REPLY_DEADLINE_S) as connection:
            connection.sendall(json.dumps({"token": reply["token"], **answer}).encode())
            connection.shutdown(socket.SHUT_WR)
    except Exception as error:
        print(f"megarl: the answer to {request.get('verb')} could not be delivered: {error!r}", flush=True)
