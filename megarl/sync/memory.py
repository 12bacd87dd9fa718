"""Buckets through memory that processes of one machine share: that of the sender's GPU, or shared memory.

Each training rank has a ring of slots, and a file of counters by which it and each server rank that it sends to hand
the slots over. Counters are written by one side each, after the bytes that they cover; x86 and the calls of Python in
between keep that order.
"""

import mmap
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megarl.sync.buckets import NUM_SLOTS, BucketTransport, Empty, Fill, TransportError
from megarl.sync.plan import Bucket
from megarl.sync.slots import GpuSlots, HostSlots, Slots, Way

SHARED_MEMORY = Path("/dev/shm")
UNMAP_PATIENCE_S = 2.0
"""How long a training rank keeps its GPU memory for a server rank that still maps it, and may have been lost"""


def find_node() -> str:
    """Names the shared memory of this process: the machine's boot and its /dev/shm, of which containers have others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat(SHARED_MEMORY).st_dev}"


def choose_way(has_gpus: bool, refusals: Sequence[str]) -> tuple[Way, str]:
    """The way of all pairs of ranks on the same node, and why; refusals: of ranks that tried CUDA IPC."""
    if not has_gpus:
        return Way.pageable, "there is no GPU"
    if refusals:
        return Way.pinned, refusals[0]
    return Way.ipc, "every server rank maps the memory of its training ranks"


class MemoryTransport(BucketTransport):
    """One rank's end of the rings; removing a ring's directory aborts the sync."""

    POLL_S = 5e-5
    LOOK_S = 0.1

    def __init__(
        self,
        spec: Mapping[str, Any],
        rank: int,
        *,
        is_source: bool,
        device: torch.device,
        peers: Iterable[int],
        gpu: Any = None,
    ) -> None:
        """Arguments that need a word:

        spec: `directories` (of each training rank's ring, in shared memory; None: it has no ring), `slot_bytes`, `way`,
        `num_targets`, `deadline_s` (of each wait). peers: the training ranks from which a server rank receives; it
        waits for their rings. gpu: in place of `megarl.sync.gpu_memory`.

        Raises TransportError.
        """
        self._deadline_s, self._device = float(spec["deadline_s"]), device
        self._rings: dict[int, _Ring] = {}
        try:
            for source in [rank] if is_source else sorted(set(peers)):
                if spec["directories"][source] is None:
                    continue
                directory = Path(spec["directories"][source])
                if not is_source:
                    name = f"training rank {source} has not made its memory {directory}"
                    self._wait((directory / _Counters.FILE).exists, name)
                self._rings[source] = _Ring(directory, spec, rank, is_source=is_source, device=device, gpu=gpu)
        except BaseException:
            self.close()
            raise

    def sending(self, buckets: Sequence[Bucket], fill: Fill) -> Iterator[None]:
        if not buckets:
            return
        (ring,) = self._rings.values()
        for bucket in buckets:
            self._wait(ring.has_free_slot, f"server rank {ring.slot_user} has not read a bucket", ring.directory)
            ring.put(bucket, fill)
            yield
        for target in sorted({bucket.target for bucket in buckets}):
            name = f"server rank {target} has not read its last bucket"
            self._wait(lambda target=target: ring.is_read(target), name, ring.directory)  # type: ignore[misc]
        ring.hide()

    def receiving(self, buckets: Sequence[Bucket], empty: Empty) -> Iterator[None]:
        for bucket in buckets:
            ring = self._rings[bucket.source]
            self._wait(ring.has_bucket, f"training rank {bucket.source} has filled no bucket", ring.directory)
            ring.take(bucket, empty)
            yield
        for ring in self._rings.values():
            ring.slots.rest()

    def close(self) -> None:
        for ring in self._rings.values():
            ring.close()
        self._rings = {}

    def _wait(self, condition: Callable[[], bool], what: str, directory: Path | None = None) -> None:
        start = looked = time.monotonic()
        while not condition():
            now = time.monotonic()
            if now > start + self._deadline_s:
                raise TransportError(f"{what} within {self._deadline_s:g} s")
            if directory is not None and now > looked + self.LOOK_S:
                looked = now
                if not directory.exists():
                    raise TransportError(f"{what} when the sync was aborted")
            time.sleep(self.POLL_S)


class _Ring:
    """The slots of one training rank and their counters, at either end."""

    def __init__(
        self, directory: Path, spec: Mapping[str, Any], rank: int, *, is_source: bool, device: torch.device, gpu: Any
    ) -> None:
        """rank: of this process within its side."""
        self.directory = directory
        self._rank, self._is_source = rank, is_source
        self._users: list[tuple[int, int] | None] = [None] * NUM_SLOTS
        self._num_sent = 0
        if is_source:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        kind = GpuSlots if Way(spec["way"]) is Way.ipc else HostSlots
        self.slots: Slots = kind(directory, spec, is_source=is_source, device=device, gpu=gpu)
        # Last: once the counters are there, a server rank opens the slots.
        self._counters = _Counters(directory, spec["num_targets"], create=is_source)
        if not is_source:
            self._counters.mark_mapped(rank, True)

    @property
    def slot_user(self) -> int | None:
        """The server rank that the next slot waits for."""
        user = self._users[self._num_sent % NUM_SLOTS]
        return None if user is None else user[0]

    def has_free_slot(self) -> bool:
        user = self._users[self._num_sent % NUM_SLOTS]
        return user is None or self._counters.load_read(user[0]) >= user[1]

    def put(self, bucket: Bucket, fill: Fill) -> None:
        slot, target = self._num_sent % NUM_SLOTS, bucket.target
        self.slots.write(slot, bucket, fill)
        number = self._counters.load_filled(target) + 1
        self._counters.store_filled(target, number, slot)
        self._users[slot] = (target, number)
        self._num_sent += 1

    def is_read(self, target: int) -> bool:
        return self._counters.load_read(target) == self._counters.load_filled(target)

    def has_bucket(self) -> bool:
        return self._counters.load_filled(self._rank) > self._counters.load_read(self._rank)

    def take(self, bucket: Bucket, empty: Empty) -> None:
        number = self._counters.load_read(self._rank) + 1
        self.slots.read(self._counters.load_slot(self._rank, number), bucket, empty)
        self._counters.store_read(self._rank, number)

    def hide(self) -> None:
        """Remove the names of the slots once all have opened them: they end with the processes, however those end."""
        self.slots.rest()
        for name in (HostSlots.FILE, GpuSlots.FILE):
            (self.directory / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Also tells the other ends, which find the directory gone."""
        if not self._is_source:
            self.slots.close()
            self._counters.mark_mapped(self._rank, False)
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._is_source:
            end = time.monotonic() + UNMAP_PATIENCE_S
            while self._counters.is_mapped() and time.monotonic() < end:
                time.sleep(MemoryTransport.POLL_S)
            self.slots.close()
        self._counters.close()


class _Counters:
    """For each server rank a line written by the training rank (number of buckets filled, slots of the last ones) and
    one written by the server rank (number of buckets read, whether it maps the slots).
    """

    FILE = "counters"
    LINE = 64

    def __init__(self, directory: Path, num_targets: int, *, create: bool) -> None:
        path = directory / self.FILE
        self._num_targets = num_targets
        size = 2 * self.LINE * num_targets
        if create:
            new = path.with_suffix(".new")
            new.touch(0o600)
            os.truncate(new, size)
            new.rename(path)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)

    def load_filled(self, target: int) -> int:
        return self._load(2 * target, 0)

    def load_slot(self, target: int, number: int) -> int:
        """The slot of the server rank's bucket `number`, counted from 1; one of the last NUM_SLOTS."""
        return self._load(2 * target, 1 + number % NUM_SLOTS)

    def store_filled(self, target: int, number: int, slot: int) -> None:
        self._store(2 * target, 1 + number % NUM_SLOTS, slot)
        self._store(2 * target, 0, number)

    def load_read(self, target: int) -> int:
        return self._load(2 * target + 1, 0)

    def store_read(self, target: int, number: int) -> None:
        self._store(2 * target + 1, 0, number)

    def mark_mapped(self, target: int, is_mapped: bool) -> None:
        self._store(2 * target + 1, 1, int(is_mapped))

    def is_mapped(self) -> bool:
        return any(self._load(2 * target + 1, 1) for target in range(self._num_targets))

    def _load(self, line: int, place: int) -> int:
        return int(struct.unpack_from("<q", self._map, line * self.LINE + 8 * place)[0])

    def _store(self, line: int, place: int, value: int) -> None:
        struct.pack_into("<q", self._map, line * self.LINE + 8 * place, value)

    def close(self) -> None:
        self._map.close()
