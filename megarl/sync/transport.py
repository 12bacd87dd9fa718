"""How buckets travel from training ranks to server ranks: over a process group, through memory, or by pair over either.

Over a group, point to point: gloo between CPUs, NCCL between GPUs. Through memory that processes of one machine share,
the sender's GPU's or shared memory: each training rank has a ring of slots, and a file of counters by which it and each
server rank that it sends to hand the slots over. Counters are written by one side each, after the bytes that they
cover; x86 and the calls of Python in between keep that order.

`megarl.sync.sync` describes the transport of a session to all ranks in JSON; see `open_transport`.
"""

import math
import mmap
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
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


PATIENCE = 10
"""The group's own timeout over the deadline of a wait, which is thus always the first to expire"""
ABORT_DEADLINE = timedelta(seconds=30)
POLL_S = 5e-5
MOST_CHANNELS = 4
"""Of an NCCL group of the weight sync"""


class GroupTransport(BucketTransport):
    """Sends buckets over a process group of its own, with NCCL over one communicator of all its ranks: torch would
    make one for each pair of them, each with buffers of its own.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        rank: int,
        *,
        is_source: bool,
        device: torch.device,
        pairs: Sequence[tuple[int, int]] | None = None,
        name: str = "all",
    ) -> None:
        """Waits for all ranks of the group.

        spec: as of `open_transport`. rank: within its side. pairs: (training rank, server rank) that exchange buckets
        in this group, whose ranks they are; no two of these may be on the same GPU; None: all ranks of both sides.
        name: of the group among those of a sync. Raises TransportError where not all join within the deadline.
        """
        self._device, self._timeout = device, timedelta(seconds=spec["deadline_s"])
        sources, targets = range(spec["num_sources"]), range(spec["num_targets"])
        members = [(True, source) for source in sources] + [(False, target) for target in targets]
        if pairs is not None:
            used = {(True, source) for source, _ in pairs} | {(False, target) for _, target in pairs}
            members = [member for member in members if member in used]
        self._numbers = {member: number for number, member in enumerate(members)}
        try:
            self._group: Any = _open_group(spec, self._numbers[is_source, rank], len(members), device, name)
        except RuntimeError as error:
            raise TransportError(
                f"the {len(members)} ranks of the weight sync did not all join within {self._timeout}: {error}"
            ) from error
        self._connect(is_source, rank, pairs or ())

    def sending(self, buckets: Sequence[Bucket], fill: Fill) -> Iterator[None]:
        slots = self._make_slots(buckets)
        works: list[tuple[Bucket, dist.Work] | None] = [None] * NUM_SLOTS
        for number, bucket in enumerate(buckets):
            slot = number % NUM_SLOTS
            self._wait(works[slot], "sent to")
            message = slots[slot][: bucket.num_bytes]
            fill(bucket, message)
            works[slot] = self._start_send(bucket, message)
            yield
        for work in works:
            self._wait(work, "sent to")

    def receiving(self, buckets: Sequence[Bucket], empty: Empty) -> Iterator[None]:
        slots = self._make_slots(buckets)
        works: list[tuple[Bucket, dist.Work] | None] = [None] * NUM_SLOTS

        def start(number: int) -> None:
            if number < len(buckets):
                message = slots[number % NUM_SLOTS][: buckets[number].num_bytes]
                works[number % NUM_SLOTS] = self._start_receive(buckets[number], message)

        for number in range(NUM_SLOTS):
            start(number)
        for number, bucket in enumerate(buckets):
            self._wait(works[number % NUM_SLOTS], "received from")
            empty(bucket, slots[number % NUM_SLOTS][: bucket.num_bytes])
            start(number + NUM_SLOTS)
            yield

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None and self._device.type == "cuda":
            # What still runs on the GPU waits for ranks that may be gone. gloo ends with the last reference.
            group._set_default_timeout(ABORT_DEADLINE)
            with suppress(RuntimeError):
                group.abort()

    def _connect(self, is_source: bool, rank: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Exchange a byte over each pair, in an order common to all: NCCL connects two ranks when both first call. In
        the middle of a sync, with buckets on other ways in between, ranks could so wait for each other in a circle.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        for source, target in sorted(pairs):
            bucket = Bucket(source, target, ())
            if (is_source, rank) == (True, source):
                self._wait(self._start_send(bucket, byte), "sent to")
            elif (is_source, rank) == (False, target):
                self._wait(self._start_receive(bucket, byte), "received from")

    def _make_slots(self, buckets: Sequence[Bucket]) -> list[Tensor]:
        largest = max((bucket.num_bytes for bucket in buckets), default=0)
        return [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(NUM_SLOTS)]

    def _start_send(self, bucket: Bucket, message: Tensor) -> tuple[Bucket, dist.Work]:
        with _naming(bucket, "sent to"):
            return bucket, self._group.send([message], self._numbers[False, bucket.target], 0)

    def _start_receive(self, bucket: Bucket, message: Tensor) -> tuple[Bucket, dist.Work]:
        with _naming(bucket, "received from"):
            return bucket, self._group.recv([message], self._numbers[True, bucket.source], 0)

    def _wait(self, work: tuple[Bucket, dist.Work] | None, what: str) -> None:
        if work is None:
            return
        bucket, pending = work
        with _naming(bucket, what):
            if self._device.type == "cuda":
                self._poll(pending)
            else:
                pending.wait(self._timeout)

    def _poll(self, work: dist.Work) -> None:
        """Wait for NCCL. With a timeout torch's own wait polls every 10 ms, in which two buckets could have passed."""
        end = time.monotonic() + self._timeout.total_seconds()
        while not work.is_completed():
            if time.monotonic() > end:
                raise TransportError(f"not within {self._timeout.total_seconds():g} s")
            time.sleep(POLL_S)
        # Raises what went wrong, and lets the current stream go on after the transfer.
        work.wait()


@contextmanager
def _naming(bucket: Bucket, what: str) -> Iterator[None]:
    """Turns an error of the group into a TransportError that names the other end."""
    try:
        yield
    except RuntimeError as error:
        other = f"server rank {bucket.target}" if what == "sent to" else f"training rank {bucket.source}"
        raise TransportError(f"a bucket was not {what} {other}: {error}") from error


def _open_group(spec: Mapping[str, Any], rank: int, size: int, device: torch.device, name: str) -> Any:
    """A process group outside torch.distributed's registry: the processes at both ends have default groups already.

    Any: torch's stubs know neither the groups' options nor that they are process groups.
    """
    timeout = timedelta(seconds=spec["deadline_s"])
    store: dist.Store
    if spec["file"]:
        store = dist.FileStore(f"{spec['file']}-{name}", size)
    else:
        store = dist.PrefixStore(name, dist.TCPStore(spec["host"], spec["port"], size, False, timeout))
    # NCCL waits for missing ranks without end.
    if store.add("arrived", 1) == size:
        store.set("all arrived", "")
    store.wait(["all arrived"], timeout)
    kind: Any = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
    options = kind.Options() if device.type == "cuda" else kind._Options()
    options._timeout = PATIENCE * timeout
    if device.type != "cuda":
        options._devices = [_make_device(kind, spec)]
        return kind(store, rank, size, options)
    # Each of a rank's groups, one for each other node, has buffers for all of its channels as long as the run lasts; a
    # few keep a network card busy.
    options.config.min_ctas, options.config.max_ctas = 1, MOST_CHANNELS
    with without_watchdog():
        group = kind(store, rank, size, options)
    # Otherwise torch makes a communicator for each pair at its first message.
    group.eager_connect_single_device(device)
    return group


@contextmanager
def without_watchdog() -> Iterator[None]:
    """An NCCL group made within the block has no watchdog thread of torch's.

    The watchdog ends the process over a rank that is lost or late, and its signal to write a report makes the default
    group's monitor do so even where errors of this group are set to be handled: lost servers are started anew instead.
    torch reads the variable when a group is made (ProcessGroupNCCL.cpp: "in blockingWait mode, we don't need to enable
    the watchdog thread"); the default group and Megatron's keep theirs.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _make_device(gloo: Any, spec: Mapping[str, Any]) -> Any:
    """gloo's device: listens on the address that all ranks share, or on this machine's interface to the other nodes."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if spec["file"]:
        return gloo.create_device(hostname=spec["host"])
    return gloo.create_device(interface=interface) if interface else gloo.create_default_device()


class HostSlots:
    """Between CPUs: NUM_SLOTS places for a bucket each, in a file in shared memory."""

    FILE = "slots"

    def __init__(self, path: Path, slot_bytes: int, *, is_source: bool) -> None:
        """Raises TransportError where shared memory is full."""
        self._slot_bytes, size = slot_bytes, NUM_SLOTS * slot_bytes
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if is_source else 0), 0o600)
        try:
            if is_source:
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

    def write(self, slot: int, bucket: Bucket, fill: Fill) -> None:
        """Fill the slot; the bytes are there for the other end when this returns."""
        fill(bucket, self._bytes[slot * self._slot_bytes :][: bucket.num_bytes])

    def read(self, slot: int, bucket: Bucket, empty: Empty) -> None:
        """Hand the slot's bytes to `empty`; they are needed no more when this returns."""
        empty(bucket, self._bytes[slot * self._slot_bytes :][: bucket.num_bytes])

    def rest(self) -> None:
        """Free what is not needed between syncs: nothing."""

    def close(self) -> None:
        del self._bytes
        with suppress(BufferError):
            self._map.close()


class GpuSlots:
    """The same on the training rank's GPU, which server ranks map; the handle is in a file of 128 hexadecimal digits.

    A server rank has one more buffer, from a sync's begin to its end.
    """

    FILE = "handle"

    def __init__(self, path: Path, slot_bytes: int, *, is_source: bool, device: torch.device, gpu: Any) -> None:
        """Raises TransportError where CUDA refuses."""
        self._slot_bytes, self._device = slot_bytes, device
        self._buffer: Tensor | None = None
        self._own: Any = None
        self._mapped: Any = None
        try:
            if is_source:
                self._own = gpu.SharedBuffer(NUM_SLOTS * slot_bytes, device)
                path.touch(0o600)
                path.write_text(self._own.handle.hex())
            else:
                self._mapped = gpu.MappedBuffer(bytes.fromhex(path.read_text()), device)
        except (gpu.GpuMemoryError, ValueError, OSError) as error:
            hint = "rollout.transport=disk needs no memory that processes share, nor does split on GPUs of their own"
            raise TransportError(f"{path}: {error}; {hint}") from error

    def write(self, slot: int, bucket: Bucket, fill: Fill) -> None:
        start = slot * self._slot_bytes
        fill(bucket, self._own.bytes[start : start + bucket.num_bytes])
        self._own.finish()

    def read(self, slot: int, bucket: Bucket, empty: Empty) -> None:
        if self._buffer is None:
            self._buffer = torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._device)
        message = self._buffer[: bucket.num_bytes]
        self._mapped.copy_to(message, slot * self._slot_bytes)
        empty(bucket, message)

    def rest(self) -> None:
        self._buffer = None

    def close(self) -> None:
        self.rest()
        for buffer in (self._own, self._mapped):
            if buffer is not None:
                buffer.close()


SHARED_MEMORY = Path("/dev/shm")
UNMAP_PATIENCE_S = 2.0
"""How long a training rank keeps its GPU memory for a server rank that still maps it, and may have been lost"""


def find_node() -> str:
    """Names the shared memory of this process: the machine's boot and its /dev/shm, of which containers have others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat(SHARED_MEMORY).st_dev}"


class MemoryTransport(BucketTransport):
    """One rank's end of the rings; removing a ring's directory aborts the sync."""

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
        """Waits, at a server rank, for the rings of its peers. Raises TransportError.

        spec: as of `open_transport`. peers: the training ranks from which a server rank receives. gpu: in place of
        `megarl.sync.gpu_memory`, which needs CUDA's driver.
        """
        self._deadline_s = float(spec["deadline_s"])
        self._rings: dict[int, _Ring] = {}
        if device.type == "cuda" and gpu is None:
            from megarl.sync import gpu_memory as gpu
        try:
            for source in [rank] if is_source else sorted(set(peers)):
                if spec["directories"][source] is None:
                    continue
                directory = Path(spec["directories"][source])
                if not is_source:
                    name = f"training rank {source} has not made its memory {directory}"
                    self._wait((directory / _Ring.COUNTERS).exists, name)
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
            time.sleep(POLL_S)


class _Ring:
    """The slots of one training rank and their counters, at either end.

    The counters are int64 [server ranks, 2, 8]: of each a line of 64 bytes that the training rank writes (number of
    buckets filled, slots of the last ones) and one that the server rank writes (number of buckets read, whether it
    maps the slots).
    """

    COUNTERS = "counters"
    FILLED, READ, MAPPED = (0, 0), (1, 0), (1, 1)

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
        size = spec["slot_bytes"]
        self.slots: HostSlots | GpuSlots = (
            HostSlots(directory / HostSlots.FILE, size, is_source=is_source)
            if gpu is None
            else GpuSlots(directory / GpuSlots.FILE, size, is_source=is_source, device=device, gpu=gpu)
        )
        # Last: once the counters are there, a server rank opens the slots.
        path, shape = directory / self.COUNTERS, (spec["num_targets"], 2, 8)
        if is_source:
            new = path.with_suffix(".new")
            new.touch(0o600)
            os.truncate(new, 8 * math.prod(shape))
            new.rename(path)
        self._table: Any = numpy.memmap(path, numpy.int64, "r+", shape=shape)
        if not is_source:
            self._table[rank][self.MAPPED] = 1

    @property
    def slot_user(self) -> int | None:
        """The server rank that the next slot waits for."""
        user = self._users[self._num_sent % NUM_SLOTS]
        return None if user is None else user[0]

    def has_free_slot(self) -> bool:
        user = self._users[self._num_sent % NUM_SLOTS]
        return user is None or bool(self._table[user[0]][self.READ] >= user[1])

    def put(self, bucket: Bucket, fill: Fill) -> None:
        slot, counters = self._num_sent % NUM_SLOTS, self._table[bucket.target]
        self.slots.write(slot, bucket, fill)
        number = int(counters[self.FILLED]) + 1
        counters[0, 1 + number % NUM_SLOTS] = slot
        counters[self.FILLED] = number
        self._users[slot] = (bucket.target, number)
        self._num_sent += 1

    def is_read(self, target: int) -> bool:
        return bool(self._table[target][self.READ] == self._table[target][self.FILLED])

    def has_bucket(self) -> bool:
        return not self.is_read(self._rank)

    def take(self, bucket: Bucket, empty: Empty) -> None:
        counters = self._table[self._rank]
        number = int(counters[self.READ]) + 1
        self.slots.read(int(counters[0, 1 + number % NUM_SLOTS]), bucket, empty)
        counters[self.READ] = number

    def hide(self) -> None:
        """Remove the names of the slots once all have opened them: they end with the processes, however those end."""
        self.slots.rest()
        (self.directory / self.slots.FILE).unlink(missing_ok=True)

    def close(self) -> None:
        """Also tells the other ends, which find the directory gone."""
        if not self._is_source:
            self.slots.close()
            self._table[self._rank][self.MAPPED] = 0
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._is_source:
            end = time.monotonic() + UNMAP_PATIENCE_S
            while self._table[:, 1, 1].any() and time.monotonic() < end:
                time.sleep(POLL_S)
            self.slots.close()


class MixedTransport(BucketTransport):
    """Through memory within a node, over a process group between nodes; buckets keep their common order."""

    def __init__(
        self, memory: BucketTransport, groups: Sequence[tuple[BucketTransport, Iterable[tuple[int, int]]]]
    ) -> None:
        """groups: each with its pairs (training rank, server rank); all other pairs use memory."""
        self._memory = memory
        self._ways = {pair: group for group, pairs in groups for pair in pairs}
        self._parts = (memory, *(group for group, _ in groups))

    def sending(self, buckets: Sequence[Bucket], fill: Fill) -> Iterator[None]:
        return self._walk(buckets, lambda part, own: part.sending(own, fill))

    def receiving(self, buckets: Sequence[Bucket], empty: Empty) -> Iterator[None]:
        return self._walk(buckets, lambda part, own: part.receiving(own, empty))

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _walk(
        self, buckets: Sequence[Bucket], begin: Callable[[BucketTransport, Sequence[Bucket]], Iterator[None]]
    ) -> Iterator[None]:
        """One step for each bucket: out of the common order, ranks would wait for each other in a circle."""
        steps = [begin(part, [each for each in buckets if self._pick(each) is part]) for part in self._parts]
        for bucket in buckets:
            next(steps[self._parts.index(self._pick(bucket))])
            yield
        for rest in steps:
            yield from rest

    def _pick(self, bucket: Bucket) -> BucketTransport:
        return self._ways.get((bucket.source, bucket.target), self._memory)


def open_transport(
    spec: Mapping[str, Any],
    rank: int,
    *,
    is_source: bool,
    device: torch.device,
    peers: Iterable[int] = (),
) -> BucketTransport:
    """This process's end of a transport; both ends open theirs at the same time. Raises TransportError.

    rank: within its side, training ranks or server ranks. peers: the training ranks from which a server rank receives.

    spec, the same for all ranks, is JSON. Always: `kind`, `num_sources` (training ranks), `num_targets` (server ranks),
    `deadline_s` (of each wait). By kind:

    - `group`: `host`, and `file` (the rendezvous, which all ranks see) or else `port` (of a TCPStore at `host`).
    - `memory`: `directories` (one for each training rank, in /dev/shm, that it creates; None: it has no ring),
      `slot_bytes` (of the largest bucket), and `far`: the pairs [training rank, server rank] that use a group, in a
      list for each group, by the keys above. No two ranks of a group may be on the same GPU, which NCCL refuses.
    """
    if spec["kind"] == "group":
        return GroupTransport(spec, rank, is_source=is_source, device=device)
    far = [[(source, target) for source, target in pairs] for pairs in spec["far"]]
    near = [peer for peer in peers if not any((peer, rank) in pairs for pairs in far)]
    memory = MemoryTransport(spec, rank, is_source=is_source, device=device, peers=near)
    groups: list[tuple[BucketTransport, list[tuple[int, int]]]] = []
    try:
        for number, pairs in enumerate(far):
            if rank in {pair[0 if is_source else 1] for pair in pairs}:
                group = GroupTransport(spec, rank, is_source=is_source, device=device, pairs=pairs, name=str(number))
                groups.append((group, pairs))
    except BaseException:
        MixedTransport(memory, groups).close()
        raise
    return MixedTransport(memory, groups)
