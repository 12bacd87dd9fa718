"""How buckets travel from training ranks to server ranks: point to point over a process group, or through memory that
processes of one machine share. Both ends walk the same list of buckets; a bucket is filled while earlier ones travel.
"""

import mmap
import os
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.sync.plan import Bucket

NUM_SLOTS = 2
"""Buckets in flight at a time, per sender or receiver; in shared memory, per pair of them"""
Fill = Callable[[Bucket, Tensor], None]
"""Writes a bucket into uint8 [num_bytes]."""


class TransportError(RuntimeError):
    """A bucket did not arrive in time, or its other end has ended; the message says which."""


class BucketTransport(ABC):
    """One process's end of a connection that carries buckets."""

    @abstractmethod
    def send(self, buckets: Sequence[Bucket], fill: Fill) -> None:
        """Send the buckets; returns when all have been sent. Raises TransportError."""

    @abstractmethod
    def receive(self, buckets: Sequence[Bucket]) -> Iterator[tuple[Bucket, Tensor]]:
        """Each bucket with its bytes, uint8 [num_bytes], valid until the next one is read. Raises TransportError."""

    @abstractmethod
    def close(self) -> None: ...


class GroupTransport(BucketTransport):
    """Sends buckets over a process group of its own: gloo between CPUs, NCCL between GPUs.

    The ranks are the training ranks, then the server ranks.
    """

    def __init__(self, spec: Mapping[str, Any], rank: int, device: torch.device) -> None:
        """Waits for all ranks. Raises TransportError where they do not join within the deadline."""
        self._num_sources, self._device = spec["num_sources"], device
        self._timeout = timedelta(seconds=spec["deadline_s"])
        size = spec["num_sources"] + spec["num_targets"]
        try:
            self._group = _open_group(spec, rank, size, device, self._timeout)
        except RuntimeError as error:
            raise TransportError(
                f"the {size} ranks of the weight sync did not all join within {self._timeout}: {error}"
            ) from error

    def send(self, buckets: Sequence[Bucket], fill: Fill) -> None:
        slots = self._make_slots(buckets)
        works: list[tuple[Bucket, dist.Work] | None] = [None] * NUM_SLOTS
        for number, bucket in enumerate(buckets):
            slot = number % NUM_SLOTS
            self._wait(works[slot], "sent to")
            message = slots[slot][: bucket.num_bytes]
            fill(bucket, message)
            works[slot] = bucket, self._group.send([message], self._num_sources + bucket.target, 0)
        for work in works:
            self._wait(work, "sent to")

    def receive(self, buckets: Sequence[Bucket]) -> Iterator[tuple[Bucket, Tensor]]:
        slots = self._make_slots(buckets)
        works: list[tuple[Bucket, dist.Work] | None] = [None] * NUM_SLOTS

        def start(number: int) -> None:
            if number < len(buckets):
                message = slots[number % NUM_SLOTS][: buckets[number].num_bytes]
                works[number % NUM_SLOTS] = buckets[number], self._group.recv([message], buckets[number].source, 0)

        for number in range(NUM_SLOTS):
            start(number)
        for number, bucket in enumerate(buckets):
            self._wait(works[number % NUM_SLOTS], "received from")
            yield bucket, slots[number % NUM_SLOTS][: bucket.num_bytes]
            start(number + NUM_SLOTS)

    def close(self) -> None:
        # Its threads and connections end with the last reference.
        del self._group

    def _make_slots(self, buckets: Sequence[Bucket]) -> list[Tensor]:
        largest = max((bucket.num_bytes for bucket in buckets), default=0)
        return [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(NUM_SLOTS)]

    def _wait(self, work: tuple[Bucket, dist.Work] | None, what: str) -> None:
        if work is None:
            return
        bucket, pending = work
        try:
            pending.wait(self._timeout)
        except RuntimeError as error:
            other = f"server rank {bucket.target}" if what == "sent to" else f"training rank {bucket.source}"
            raise TransportError(f"a bucket of {bucket.num_bytes} bytes was not {what} {other}: {error}") from error


def _open_group(
    spec: Mapping[str, Any], rank: int, size: int, device: torch.device, timeout: timedelta
) -> dist.ProcessGroup:
    """A process group outside torch.distributed's registry: the processes at both ends have default groups already."""
    store: dist.Store
    if spec["file"]:
        store = dist.FileStore(spec["file"], size)
    else:
        store = dist.TCPStore(spec["host"], spec["port"], size, False, timeout)
    # Any: torch's stubs know neither their options nor that they are process groups.
    kind: Any = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
    options = kind.Options() if device.type == "cuda" else kind._Options()
    options._timeout = timeout
    if device.type != "cuda":
        options._devices = [_make_device(kind, spec)]
    group: dist.ProcessGroup = kind(store, rank, size, options)
    return group


def _make_device(gloo: Any, spec: Mapping[str, Any]) -> Any:
    """gloo's device: listens on the address that all ranks share, or on this machine's interface to the other nodes."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if spec["file"]:
        return gloo.create_device(hostname=spec["host"])
    return gloo.create_device(interface=interface) if interface else gloo.create_default_device()


class SharedMemoryTransport(BucketTransport):
    """Files in shared memory, one for each pair of ranks: a ring of slots with counts of filled and of read slots.

    Only between processes of one machine. Removing the directory of the files aborts the sync. Each count is written
    by one side, after the bytes that it covers; x86 and the calls of Python in between keep that order.
    """

    POLL_S = 5e-5
    LOOK_S = 0.1

    def __init__(self, directory: Path, slot_bytes: int, deadline_s: float) -> None:
        """directory: in shared memory, created by the owner of the sync. deadline_s: of each wait."""
        self._directory, self._slot_bytes, self._deadline_s = directory, slot_bytes, deadline_s
        self._rings: dict[tuple[int, int], _Ring] = {}

    def send(self, buckets: Sequence[Bucket], fill: Fill) -> None:
        for bucket in buckets:
            ring = self._open(bucket)
            name = f"server rank {bucket.target} has read none of {NUM_SLOTS} buckets"
            self._wait(ring.has_free_slot, name)
            fill(bucket, ring.slot(ring.filled)[: bucket.num_bytes])
            ring.filled += 1
        for pair, ring in self._rings.items():
            self._wait(ring.is_empty, f"server rank {pair[1]} has not read its last bucket")

    def receive(self, buckets: Sequence[Bucket]) -> Iterator[tuple[Bucket, Tensor]]:
        for bucket in buckets:
            ring = self._open(bucket)
            name = f"training rank {bucket.source} has filled no bucket"
            self._wait(ring.has_bucket, name)
            yield bucket, ring.slot(ring.read)[: bucket.num_bytes]
            ring.read += 1

    def close(self) -> None:
        for ring in self._rings.values():
            ring.close()
        self._rings = {}

    def _open(self, bucket: Bucket) -> "_Ring":
        pair = (bucket.source, bucket.target)
        if pair not in self._rings:
            self._rings[pair] = _Ring(self._directory / f"{pair[0]}-{pair[1]}", self._slot_bytes)
        return self._rings[pair]

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        start = looked = time.monotonic()
        while not condition():
            now = time.monotonic()
            if now > start + self._deadline_s:
                raise TransportError(f"{what} within {self._deadline_s:g} s")
            if now > looked + self.LOOK_S:
                looked = now
                if not self._directory.exists():
                    raise TransportError(f"{what} when the sync was aborted")
            time.sleep(self.POLL_S)


class _Ring:
    """The ring of one pair of ranks. Whichever side comes first creates the file, all of whose bytes are then zero."""

    HEADER = 128

    def __init__(self, path: Path, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        size = self.HEADER + NUM_SLOTS * slot_bytes
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # Without allocation, a full /dev/shm would kill the process at its first write.
            os.posix_fallocate(descriptor, 0, size)
            self._map = mmap.mmap(descriptor, size)
        except OSError as error:
            free = os.statvfs(path.parent)
            raise TransportError(
                f"{path}: {size} bytes of shared memory are needed and {free.f_bavail * free.f_frsize} are free:"
                f" {error}; a smaller rollout.sync_bucket_mb needs less"
            ) from error
        finally:
            os.close(descriptor)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    @property
    def filled(self) -> int:
        return int(struct.unpack_from("<q", self._map, 0)[0])

    @filled.setter
    def filled(self, count: int) -> None:
        struct.pack_into("<q", self._map, 0, count)

    @property
    def read(self) -> int:
        return int(struct.unpack_from("<q", self._map, 64)[0])

    @read.setter
    def read(self, count: int) -> None:
        struct.pack_into("<q", self._map, 64, count)

    def has_free_slot(self) -> bool:
        return self.filled - self.read < NUM_SLOTS

    def has_bucket(self) -> bool:
        return self.filled > self.read

    def is_empty(self) -> bool:
        return self.filled == self.read

    def slot(self, number: int) -> Tensor:
        start = self.HEADER + number % NUM_SLOTS * self._slot_bytes
        return self._bytes[start : start + self._slot_bytes]

    def close(self) -> None:
        del self._bytes
        with suppress(BufferError):
            self._map.close()


def open_transport(spec: Mapping[str, Any], rank: int, *, is_source: bool, device: torch.device) -> BucketTransport:
    """This process's end of the transport that `ShardSync` describes. rank: within its side. Raises TransportError."""
    if spec["kind"] == "memory":
        return SharedMemoryTransport(Path(spec["directory"]), spec["slot_bytes"], spec["deadline_s"])
    return GroupTransport(spec, rank if is_source else spec["num_sources"] + rank, device)
