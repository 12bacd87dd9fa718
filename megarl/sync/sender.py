"""The sending end of the weight sync in each training rank: sends its part of the weights and of their checksums."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.mcore.device import device
from megarl.mcore.worker import MegatronWorker
from megarl.sync.pieces import describe_rank
from megarl.sync.plan import Bucket, Copy, Piece, fill_bucket, sum_checksums
from megarl.sync.transport import BucketTransport, find_node, open_transport


class WeightSender:
    """Rank-local half of the policy sender. Every rank is called with the same verb at the same time."""

    def __init__(self, worker: MegatronWorker) -> None:
        self._worker = worker
        self._transport: BucketTransport | None = None
        self._rank = -1
        self._buckets: Sequence[Bucket] = ()
        self._words: Mapping[tuple[int, str], int] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def locate(self) -> tuple[str, int]:
        """The node (`find_node`) and the process id."""
        return find_node(), os.getpid()

    def describe(self) -> list[Piece]:
        """The pieces that this rank holds, including those that other ranks hold too."""
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
        self.close()
        self._transport = open_transport(transport, self._rank, is_source=True, device=device())

    def send(self) -> None:
        """Send all buckets of this rank. Raises TransportError."""
        assert self._transport is not None, "send was called before open"
        with torch.no_grad(), self._worker.offload.during(training=False):
            tensors = self._worker.shards()
            try:
                self._transport.send(self._buckets, lambda bucket, out: fill_bucket(bucket, out, tensors, self._dtypes))
            except BaseException:
                # Ranks that wait for this one then learn of it at once.
                self.close()
                raise

    def checksum(self) -> dict[tuple[int, str], int]:
        """What this rank's parameters add to each checksum, by (server rank, tensor name)."""
        with torch.no_grad(), self._worker.offload.during(training=False):
            tensors = self._worker.shards()

            def take(copy: Copy) -> Tensor:
                return copy.source.of(tensors[copy.source_tensor]).to(self._dtypes[copy.target_tensor])

            return sum_checksums(self._buckets, self._words, take)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None
