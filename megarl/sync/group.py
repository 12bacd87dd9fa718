"""Buckets point to point over a process group: gloo between CPUs, NCCL between GPUs."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.sync.buckets import NUM_SLOTS, BucketTransport, Empty, Fill, TransportError
from megarl.sync.plan import Bucket

PATIENCE = 10
"""The group's own timeout over the deadline of a wait, which is thus always the first to expire"""
ABORT_DEADLINE = timedelta(seconds=30)
POLL_S = 5e-5


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
