"""How fast weights pass between two processes on one device, and whether every byte arrives."""

import multiprocessing as mp
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from megarl.sync.ends import empty_bucket, fill_bucket
from megarl.sync.plan import Bucket, Copy, TensorSlice
from megarl.sync.transport import SHARED_MEMORY, open_transport
from megarl.tools.gpu.lines import Line, fail, judge, skip
from megarl.tools.gpu.setting import CPU, CUDA, Setting

NUM_BYTES = {CPU: 32 << 20, CUDA: 4 << 30}
DEADLINE_S = 120.0
NAME = "bytes"
WAYS = {CPU: "shared memory", CUDA: "GPU memory (CUDA IPC)"}


def check_transfer(setting: Setting) -> Iterator[Line]:
    """Weights from one process to another on this device, as with rollout.transport=colocated."""
    if setting.device == CUDA and (find_spec("cuda") is None or find_spec("cuda.bindings") is None):
        yield skip("transfer", WAYS[CUDA], "cuda-bindings is not installed")
        return
    num_bytes = NUM_BYTES[setting.device]
    try:
        yield move(setting.device, num_bytes, min(setting.config.rollout.sync_bucket_mb << 20, num_bytes // 8))
    except Exception as error:
        yield fail("transfer", WAYS[setting.device], f"{type(error).__name__}: {error}")


def move(device: str, num_bytes: int, bucket_bytes: int) -> Line:
    """Send so many random bytes to another process twice, and count those that it found wrong; the second time is
    measured.
    """
    context = mp.get_context("spawn")
    own, other = context.Pipe()
    spec = {
        "kind": "memory",
        "directories": [str(SHARED_MEMORY / f"megarl-check-{os.getpid()}")],
        "slot_bytes": bucket_bytes,
        "far": [],
        "num_sources": 1,
        "num_targets": 1,
        "deadline_s": DEADLINE_S,
    }
    arguments = (spec, device, num_bytes, bucket_bytes, other)
    receiver = context.Process(target=run_receiver, args=arguments, daemon=True)
    receiver.start()
    # Then its end shows here at once.
    other.close()
    with ExitStack() as stack:
        stack.callback(receiver.join)
        stack.callback(receiver.kill)
        transport = open_transport(spec, 0, is_source=True, device=torch.device(device))
        stack.callback(transport.close)
        source, buckets = {NAME: make_bytes(device, num_bytes)}, cut(num_bytes, bucket_bytes)
        seconds = 0.0
        for _ in range(2):
            await_answer(own)
            start = time.perf_counter()
            transport.send(buckets, partial(fill, tensors=source))
            seconds = time.perf_counter() - start
        wrong = await_answer(own)
    note = f"{num_bytes / seconds / 1e9:.2f} GB/s, of {num_bytes >> 20} MiB"
    return judge("transfer", f"{WAYS[device]}: wrong bytes", wrong, most=0, unit="bytes", reason=note)


def run_receiver(
    spec: Mapping[str, Any], device: str, num_bytes: int, bucket_bytes: int, connection: Connection
) -> None:
    """The other process: says that it is ready, takes the buckets into a tensor of its own, counts what is wrong."""
    transport = open_transport(spec, 0, is_source=False, device=torch.device(device), peers=[0])
    expected, buckets = make_bytes(device, num_bytes), cut(num_bytes, bucket_bytes)
    held = torch.zeros_like(expected)
    for _ in range(2):
        held.zero_()
        connection.send(0)
        transport.receive(buckets, partial(empty_bucket, tensors={NAME: held}))
    connection.send(int((held != expected).sum()))
    transport.close()


def await_answer(connection: Connection) -> int:
    if not connection.poll(DEADLINE_S):
        raise TimeoutError(f"the receiving process gave no answer within {DEADLINE_S:g} s")
    try:
        return int(connection.recv())
    except EOFError:
        raise RuntimeError("the receiving process ended early") from None


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
