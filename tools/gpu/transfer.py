"""How fast weights pass between two processes on one device, by each way, and whether every byte arrives."""

import multiprocessing as mp
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.sync.messages import empty_bucket, fill_bucket
from megarl.sync.plan import Bucket, Copy
from megarl.sync.slices import TensorSlice
from megarl.sync.transport import open_transport
from megarl.tools.gpu.lines import Line, judge, skip
from megarl.tools.gpu.setting import CPU, CUDA, Setting

NUM_BYTES = {CPU: 32 << 20, CUDA: 4 << 30}
DEADLINE_S = 120.0
NAME = "bytes"
WAYS = {"pageable shared memory": False}
"""Whether the way needs a GPU"""


def check_transfer(setting: Setting) -> Iterator[Line]:
    """Weights from one process to another on this device, by each way of rollout.transport=colocated."""
    for way, needs_gpu in WAYS.items():
        if needs_gpu and setting.device != CUDA:
            yield skip("transfer", way, "needs a GPU")
            continue
        size = setting.config.rollout.sync_bucket_mb << 20
        yield move(way, setting.device, NUM_BYTES[setting.device], size)


def move(way: str, device: str, num_bytes: int, bucket_bytes: int) -> Line:
    """Send so many random bytes to another process twice, and count those that it found wrong; the second time is
    measured.
    """
    context = mp.get_context("spawn")
    own, other = context.Pipe()
    directory = Path(tempfile.mkdtemp(prefix="megarl-check-", dir="/dev/shm"))
    spec = build_spec(way, directory, bucket_bytes)
    receiver = context.Process(target=run_receiver, args=(spec, device, num_bytes, bucket_bytes, other), daemon=True)
    receiver.start()
    try:
        transport = open_transport(spec, 0, is_source=True, device=torch.device(device))
        source, buckets = {NAME: make_bytes(device, num_bytes)}, cut(num_bytes, bucket_bytes)
        seconds = 0.0
        for _ in range(2):
            await_answer(own)
            start = time.perf_counter()
            transport.send(buckets, partial(fill, tensors=source))
            seconds = time.perf_counter() - start
        wrong = await_answer(own)
        transport.close()
    finally:
        receiver.kill()
        receiver.join()
        shutil.rmtree(directory, ignore_errors=True)
    note = f"{num_bytes / seconds / 1e9:.2f} GB/s; {num_bytes >> 20} MiB in {len(buckets)} buckets"
    return judge("transfer", f"{way}: wrong bytes", wrong, most=0, unit="bytes", reason=note)


def build_spec(way: str, directory: Path, bucket_bytes: int) -> dict[str, Any]:
    """What `open_transport` takes at both ends."""
    return {
        "kind": "memory",
        "directory": str(directory),
        "slot_bytes": bucket_bytes,
        "deadline_s": DEADLINE_S,
        "num_sources": 1,
        "num_targets": 1,
    }


def run_receiver(
    spec: Mapping[str, Any], device: str, num_bytes: int, bucket_bytes: int, connection: Connection
) -> None:
    """The other process: says that it is ready, copies the buckets into a tensor of its own, counts what is wrong."""
    transport = open_transport(spec, 0, is_source=False, device=torch.device(device))
    expected, buckets = make_bytes(device, num_bytes), cut(num_bytes, bucket_bytes)
    held = torch.zeros_like(expected)
    for _ in range(2):
        held.zero_()
        connection.send(0)
        for bucket, message in transport.receive(buckets):
            empty_bucket(bucket, message, {NAME: held})
    connection.send(int((held != expected).sum()))
    transport.close()


def await_answer(connection: Connection) -> int:
    if not connection.poll(DEADLINE_S):
        raise TimeoutError(f"the other process gave no answer within {DEADLINE_S:g} s")
    return int(connection.recv())


def make_bytes(device: str, num_bytes: int) -> Tensor:
    """uint8, the same in every process."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device, generator=generator)


def cut(num_bytes: int, bucket_bytes: int) -> list[Bucket]:
    """Buckets of one tensor of bytes."""
    starts = range(0, num_bytes, bucket_bytes)
    return [make_bucket(start, min(start + bucket_bytes, num_bytes)) for start in starts]


def make_bucket(start: int, end: int) -> Bucket:
    place = TensorSlice(start, 0, end - start, 1)
    return Bucket(0, 0, (Copy(NAME, place, NAME, place, item_size=1),))


def fill(bucket: Bucket, message: Tensor, tensors: Mapping[str, Tensor]) -> None:
    fill_bucket(bucket, message, tensors, {NAME: torch.uint8})
