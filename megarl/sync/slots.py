"""The slots of a ring: places for buckets that a training rank fills and server ranks of its machine read."""

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.sync.buckets import NUM_SLOTS, Empty, Fill, TransportError
from megarl.sync.plan import Bucket
from megarl.sync.trial import load_gpu

PAGE = 4096


class Way(Enum):
    """Where the slots lie."""

    ipc = "ipc"
    """On the training rank's GPU; server ranks map them there (CUDA IPC)"""
    pinned = "pinned"
    """In shared memory that both GPUs reach (page-locked)"""
    pageable = "pageable"
    """In shared memory; the only way without a GPU"""

    @property
    def words(self) -> str:
        names = {Way.ipc: "GPU memory (CUDA IPC)", Way.pinned: "page-locked shared memory"}
        return names.get(self, "shared memory")


class Slots(ABC):
    """NUM_SLOTS places for a bucket each; on a GPU each end has one more buffer, from a sync's begin to its end."""

    def __init__(self, slot_bytes: int, device: torch.device) -> None:
        self._slot_bytes, self._device = slot_bytes, device
        self._buffer: Tensor | None = None

    @abstractmethod
    def write(self, slot: int, bucket: Bucket, fill: Fill) -> None:
        """Fill the slot; the bytes are there for the other end when this returns."""

    @abstractmethod
    def read(self, slot: int, bucket: Bucket, empty: Empty) -> None:
        """Hand the slot's bytes to `empty`; they are needed no more when this returns."""

    def rest(self) -> None:
        """Free the buffer between syncs."""
        self._buffer = None

    @abstractmethod
    def close(self) -> None: ...

    def _get_buffer(self, num_bytes: int) -> Tensor:
        if self._buffer is None:
            self._buffer = torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._device)
        return self._buffer[:num_bytes]


class HostSlots(Slots):
    """In a file in shared memory, page-locked at either end that has a GPU."""

    FILE = "slots"

    def __init__(
        self, directory: Path, spec: Mapping[str, Any], *, is_source: bool, device: torch.device, gpu: Any
    ) -> None:
        super().__init__(spec["slot_bytes"], device)
        self._map = self._open(directory / self.FILE, NUM_SLOTS * -(-self._slot_bytes // PAGE) * PAGE, is_source)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._gpu: Any = None
        if Way(spec["way"]) is Way.pinned and device.type == "cuda":
            gpu = load_gpu(gpu)
            refusal = gpu.lock_pages(self._bytes.data_ptr(), self._bytes.numel())
            self._gpu = None if refusal else gpu
            if refusal:
                print(f"megarl: weights travel through memory that is not page-locked: {refusal}", flush=True)

    def write(self, slot: int, bucket: Bucket, fill: Fill) -> None:
        place = self._place(slot)[: bucket.num_bytes]
        if self._device.type != "cuda":
            fill(bucket, place)
            return
        message = self._get_buffer(bucket.num_bytes)
        fill(bucket, message)
        place.copy_(message, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()

    def read(self, slot: int, bucket: Bucket, empty: Empty) -> None:
        place = self._place(slot)[: bucket.num_bytes]
        if self._device.type != "cuda":
            empty(bucket, place)
            return
        message = self._get_buffer(bucket.num_bytes)
        message.copy_(place, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        empty(bucket, message)

    def close(self) -> None:
        self.rest()
        if self._gpu is not None:
            self._gpu.unlock_pages(self._bytes.data_ptr())
        del self._bytes
        with suppress(BufferError):
            self._map.close()

    def _place(self, slot: int) -> Tensor:
        start = slot * (self._bytes.numel() // NUM_SLOTS)
        return self._bytes[start:]

    def _open(self, path: Path, size: int, create: bool) -> mmap.mmap:
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        try:
            if create:
                # Without allocation, a full /dev/shm would kill the process at its first write.
                os.posix_fallocate(descriptor, 0, size)
            return mmap.mmap(descriptor, size)
        except OSError as error:
            free = os.statvfs(path.parent)
            raise TransportError(
                f"{path}: {size} bytes of shared memory are needed and {free.f_bavail * free.f_frsize} are free:"
                f" {error}; a smaller rollout.sync_bucket_mb needs less"
            ) from error
        finally:
            os.close(descriptor)


class GpuSlots(Slots):
    """On the training rank's GPU; their handle is in a file of 128 hexadecimal digits."""

    FILE = "handle"

    def __init__(
        self, directory: Path, spec: Mapping[str, Any], *, is_source: bool, device: torch.device, gpu: Any
    ) -> None:
        """Raises TransportError where CUDA refuses."""
        super().__init__(spec["slot_bytes"], device)
        gpu = load_gpu(gpu)
        self._own: Any = None
        self._mapped: Any = None
        path = directory / self.FILE
        try:
            if is_source:
                self._own = gpu.SharedBuffer(NUM_SLOTS * self._slot_bytes, device)
                path.touch(0o600)
                path.write_text(self._own.handle.hex())
            else:
                self._mapped = gpu.MappedBuffer(bytes.fromhex(path.read_text()), device)
        except (gpu.GpuMemoryError, ValueError, OSError) as error:
            raise TransportError(f"{path}: {error}") from error

    def write(self, slot: int, bucket: Bucket, fill: Fill) -> None:
        start = slot * self._slot_bytes
        fill(bucket, self._own.bytes[start : start + bucket.num_bytes])
        self._own.finish()

    def read(self, slot: int, bucket: Bucket, empty: Empty) -> None:
        message = self._get_buffer(bucket.num_bytes)
        self._mapped.copy_to(message, slot * self._slot_bytes)
        empty(bucket, message)

    def close(self) -> None:
        self.rest()
        for buffer in (self._own, self._mapped):
            if buffer is not None:
                buffer.close()
