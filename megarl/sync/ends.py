"""The two ends of the weight sync: the sender in each training rank, the receiver in each rank of an SGLang server, and
how both of them write, read and sum up the bytes of a bucket.

SGLang calls `receive` as a custom weight loader (--custom-weight-loader) through /update_weights_from_tensor, with a
request in JSON in place of weights. The answer goes to the address that the request names. Nothing in it raises: an
exception would end the server. In a server this file imports neither Megatron nor Ray nor SGLang.

Checksums add up over the parts of a tensor, so that ranks which hold parts of it make its checksum: the sum over the
words w of a matrix of w * a(row) * b(column) modulo 2^64, with odd pseudo-random a and b. A change of one word always
changes it (an odd factor has an inverse), and any other difference is missed once in 2^48 or so, as are swapped rows,
columns, words or tensors. A word is 8 bytes where the bounds of all parts of the tensor are multiples of 8 bytes, else
it is one element.
"""

import json
import math
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megarl.sync.plan import MASK, Bucket, Copy, Piece, TensorSlice, decode_bucket
from megarl.sync.transport import BucketTransport, find_node, open_transport

if TYPE_CHECKING:
    from megarl.mcore.worker import MegatronWorker

REQUEST = "megarl"
REPLY_DEADLINE_S = 30.0
CHUNK = 1 << 20
"""Words that are processed at a time"""
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class _End:
    """What both ends keep from one call to the next."""

    _transport: BucketTransport | None = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    @contextmanager
    def _moving(self) -> Iterator[BucketTransport]:
        """The open transport. It is closed where the block fails: ranks that wait for this one learn of it at once."""
        assert self._transport is not None, "open comes before"
        try:
            yield self._transport
        except BaseException:
            self.close()
            raise


class WeightSender(_End):
    """Rank-local half of the policy sender. Every rank is called with the same verb at the same time."""

    def __init__(self, worker: "MegatronWorker") -> None:
        self._worker = worker
        self._rank = -1
        self._buckets: Sequence[Bucket] = ()
        self._words: Mapping[tuple[int, str], int] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def locate(self) -> tuple[str, int]:
        """The node (`find_node`) and the process id."""
        return find_node(), os.getpid()

    def describe(self) -> list[Piece]:
        """The pieces that this rank holds, including those that other ranks hold too."""
        from megarl.sync.pieces import describe_rank

        worker = self._worker
        return describe_rank(worker.entries(), worker.arch, worker.spec.parallel, *worker.tensor_ranks())

    def prepare(
        self, rank: int, buckets: Sequence[Bucket], words: Mapping[tuple[int, str], int], dtypes: Mapping[str, str]
    ) -> None:
        """Take what the handshake decided.

        rank: of this process among the training ranks. buckets: those that it sends. words: bytes per word of each
        checksum, by (server rank, tensor). dtypes: of the target tensors, by name.
        """
        self._rank, self._buckets, self._words = rank, buckets, words
        self._dtypes = {name: getattr(torch, dtype) for name, dtype in dtypes.items()}

    def open(self, transport: Mapping[str, Any]) -> None:
        """Connect; with a process group this waits for all ranks of both sides. Raises TransportError."""
        from megarl.mcore.device import device

        self.close()
        self._transport = open_transport(transport, self._rank, is_source=True, device=device())

    def send(self) -> None:
        """Send all buckets of this rank. Raises TransportError."""
        with self._moving() as transport, torch.no_grad(), self._worker.offload.during(training=False):
            tensors = self._worker.shards()
            transport.send(self._buckets, lambda bucket, out: fill_bucket(bucket, out, tensors, self._dtypes))

    def checksum(self) -> dict[tuple[int, str], int]:
        """What this rank's parameters add to each checksum, by (server rank, tensor name)."""
        with torch.no_grad(), self._worker.offload.during(training=False):
            tensors = self._worker.shards()

            def take(copy: Copy) -> Tensor:
                return copy.source.of(tensors[copy.source_tensor]).to(self._dtypes[copy.target_tensor])

            return sum_checksums(self._buckets, self._words, take)


class _Receiver(_End):
    """What this rank keeps between requests."""

    def __init__(self) -> None:
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
        self.close()
        self._transport = open_transport(
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
        with self._moving() as transport:
            transport.receive(self.buckets, lambda bucket, message: empty_bucket(bucket, message, tensors))
        return sum(copy.num_bytes for bucket in self.buckets for copy in bucket.copies)

    def checksum(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """The checksums of what the model holds now, whatever was received."""
        words = {(self.rank, name): word for name, word in self.words.items()}
        sums = sum_checksums(self.buckets, words, lambda copy: copy.target.of(tensors[copy.target_tensor]))
        return {name: value for (_, name), value in sums.items()}


_RECEIVER = _Receiver()
VERBS: dict[str, Callable[..., Any]] = {
    name: getattr(_RECEIVER, name) for name in ("locate", "describe", "prepare", "open", "receive", "checksum")
}


def _view_experts(name: str, x: Tensor) -> Tensor:
    """Pairs of a gate row and an up row as one (`Weight.interleaved`), [E, 2 f, h] -> [E, f, 2 h] and [E, 2 f] ->
    [E, f, 2], and the other biases in one row, [E, h] -> [E h]; of the same memory.
    """
    if ".w13_weight" in name:
        return x.view(len(x), -1, 2 * math.prod(x.shape[2:]))
    return x.view(-1) if x.ndim == 2 else x


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
        if getattr(getattr(model, "config", None), "model_type", None) == "gpt_oss":
            tensors = {name: _view_experts(name, x) if ".experts." in name else x for name, x in tensors.items()}
        with torch.no_grad():
            answer = {"result": VERBS[request["verb"]](tensors, **request["arguments"])}
            if request["verb"] == "receive" and (renew := getattr(model, "post_load_weights", None)) is not None:
                # Latent attention computes with copies of parts of its weights.
                renew()
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


def fill_bucket(
    bucket: Bucket, message: Tensor, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]
) -> None:
    """Write the copies' elements into `message`, uint8 [num_bytes], rounded to the target's dtype.

    dtypes: of the target tensors, by name.
    """
    for copy, offset in zip(bucket.copies, bucket.offsets, strict=True):
        part = message[offset : offset + copy.num_bytes].view(dtypes[copy.target_tensor])
        part.view(copy.target.num_rows, copy.target.num_cols).copy_(copy.source.of(tensors[copy.source_tensor]))


def empty_bucket(bucket: Bucket, message: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Write the elements of `message`, uint8 [num_bytes], to their places in the server rank's tensors."""
    for copy, offset in zip(bucket.copies, bucket.offsets, strict=True):
        target = tensors[copy.target_tensor]
        part = message[offset : offset + copy.num_bytes].view(target.dtype)
        copy.target.of(target).copy_(part.view(copy.target.num_rows, copy.target.num_cols))


@lru_cache(maxsize=64)
def _factors(salt: int, count: int, device: torch.device) -> Tensor:
    """int64 [count], odd: the finalizer of splitmix64, here with the right shifts of signed numbers."""
    x = torch.arange(1, count + 1, device=device) * -7046029254386353131 + salt
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return (x ^ (x >> 31)) | 1


def compute_checksum(part: Tensor, at: TensorSlice, word: int) -> int:
    """The share of a tensor's checksum that one part of it contributes.

    part: [rows, cols] in the target's dtype. at: its region in the whole tensor. word: bytes per word.
    """
    item_size = part.element_size()
    if part.stride(1) != 1 or (word != item_size and part.stride(0) * item_size % 8) or part.data_ptr() % word:
        part = part.contiguous()
    bits = part.view(_INTEGERS[word])
    first = at.col * item_size // word
    cols = _factors(1, first + bits.shape[1], bits.device)[first:]
    rows = _factors(2, at.row + at.num_rows, bits.device)[at.row :]
    step = max(1, CHUNK // bits.shape[1])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.shape[0], step):
        chunk = bits[start : start + step].to(torch.int64)
        total += ((chunk * cols).sum(1) * rows[start : start + step]).sum()
    return int(total) & MASK


def sum_checksums(
    buckets: Iterable[Bucket], words: Mapping[tuple[int, str], int], take: Callable[[Copy], Tensor]
) -> dict[tuple[int, str], int]:
    """What the buckets' copies add to each checksum, by (server rank, tensor name).

    take: gives the elements of a copy in the target's dtype.
    """
    sums: dict[tuple[int, str], int] = defaultdict(int)
    for bucket in buckets:
        for copy in bucket.copies:
            key = (bucket.target, copy.target_tensor)
            sums[key] = (sums[key] + compute_checksum(take(copy), copy.target, words[key])) & MASK
    return dict(sums)
