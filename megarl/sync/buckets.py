"""What every transport of buckets offers. Both ends walk the same list of buckets, in the same order."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from megarl.sync.plan import Bucket

NUM_SLOTS = 2
"""Buckets in flight at a time, per training rank or server rank"""
Fill = Callable[[Bucket, Tensor], None]
"""Writes a bucket into uint8 [num_bytes]."""
Empty = Callable[[Bucket, Tensor], None]
"""Takes what it needs of a bucket's bytes, uint8 [num_bytes], which are overwritten afterwards."""


class TransportError(RuntimeError):
    """A bucket did not arrive in time, or its other end has ended; the message says which."""


class BucketTransport(ABC):
    """One process's end of a connection that carries buckets."""

    def send(self, buckets: Sequence[Bucket], fill: Fill) -> None:
        """Send the buckets; returns when all have been sent. Raises TransportError."""
        for _ in self.sending(buckets, fill):
            pass

    def receive(self, buckets: Sequence[Bucket], empty: Empty) -> None:
        """Receive the buckets. Raises TransportError."""
        for _ in self.receiving(buckets, empty):
            pass

    @abstractmethod
    def sending(self, buckets: Sequence[Bucket], fill: Fill) -> Iterator[None]:
        """Yields when each bucket is on its way, and ends when all have been sent."""

    @abstractmethod
    def receiving(self, buckets: Sequence[Bucket], empty: Empty) -> Iterator[None]:
        """Yields when each bucket has been emptied."""

    @abstractmethod
    def close(self) -> None: ...
