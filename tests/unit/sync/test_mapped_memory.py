"""The hand-over of GPU memory, with host memory in place of the GPU's: handles, order, deadlines, loss of an end."""

import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.sync.plan import Bucket, Copy, TensorSlice
from megarl.sync.transport import MemoryTransport, TransportError, Trial, Way, choose_way, find_node, find_refusal

CPU = torch.device("cpu")


class HostMemoryError(RuntimeError):
    """In place of GpuMemoryError."""


class HostBuffer:
    """In place of SharedBuffer: memory of this process, named by a handle of 64 bytes."""

    num_open = 0

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._file = os.memfd_create("buffer")
        os.truncate(self._file, num_bytes)
        self.bytes = torch.frombuffer(mmap.mmap(self._file, num_bytes), dtype=torch.uint8)
        self.handle = f"/proc/{os.getpid()}/fd/{self._file}".encode().ljust(64, b"\0")
        HostBuffer.num_open += 1

    def finish(self) -> None:
        pass

    def close(self) -> None:
        assert MappedHostBuffer.num_open == 0, "memory that another end maps was freed"
        os.close(self._file)
        HostBuffer.num_open -= 1


class MappedHostBuffer:
    num_open = 0

    def __init__(self, handle: bytes, device: torch.device) -> None:
        path = Path(handle.rstrip(b"\0").decode())
        if not path.exists():
            raise HostMemoryError("CUDA_ERROR_INVALID_VALUE")
        with path.open("r+b") as file:
            self._bytes = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        MappedHostBuffer.num_open += 1

    def copy_to(self, out: torch.Tensor, start: int) -> None:
        out.copy_(self._bytes[start : start + out.numel()])

    def close(self) -> None:
        MappedHostBuffer.num_open -= 1


GPU: Any = SimpleNamespace(SharedBuffer=HostBuffer, MappedBuffer=MappedHostBuffer, GpuMemoryError=HostMemoryError)


@pytest.fixture(autouse=True)
def all_closed() -> Iterator[None]:
    yield
    assert (HostBuffer.num_open, MappedHostBuffer.num_open) == (0, 0)


def make_buckets(num_targets: int) -> list[Bucket]:
    """Six for each server rank, which take turns; the one numbered n has 4 (n + 1) bytes."""
    return [
        Bucket(0, target, (Copy("w", TensorSlice(0, 0, 1, turn + 1), "w", TensorSlice(0, 0, 1, turn + 1), 4),))
        for turn in range(6)
        for target in range(num_targets)
    ]


def open_end(directory: Path, rank: int, *, is_source: bool, num_targets: int = 1, deadline_s: float = 30.0) -> Any:
    spec = {
        "way": "ipc",
        "directories": [str(directory / "ring")],
        "slot_bytes": 64,
        "num_targets": num_targets,
        "deadline_s": deadline_s,
    }
    return MemoryTransport(spec, rank, is_source=is_source, device=CPU, peers=[0], gpu=GPU)


def test_buckets_through_mapped_memory_arrive_whole_and_in_order_time_after_time(tmp_path: Path) -> None:
    buckets = make_buckets(num_targets=2)
    source = open_end(tmp_path, 0, is_source=True, num_targets=2)
    targets = [open_end(tmp_path, rank, is_source=False, num_targets=2) for rank in range(2)]
    received: list[list[tuple[int, bytes]]] = [[], []]

    def fill(bucket: Bucket, message: torch.Tensor) -> None:
        message.fill_(100 * bucket.target + bucket.num_bytes)

    def receive(rank: int) -> None:
        own = [bucket for bucket in buckets if bucket.target == rank]
        targets[rank].receive(own, lambda bucket, x: received[rank].append((bucket.num_bytes, bytes(x.tolist()))))

    for _ in range(2):
        threads = [threading.Thread(target=receive, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        source.send(buckets, fill)
        for thread in threads:
            thread.join()
    for rank in range(2):
        sizes = [4 * turn for turn in range(1, 7)] * 2
        assert received[rank] == [(size, bytes([100 * rank + size]) * size) for size in sizes]
    for end in (*targets, source):
        end.close()


def test_an_end_that_is_lost_is_named_at_the_deadline_and_its_memory_is_freed(tmp_path: Path) -> None:
    source = open_end(tmp_path, 0, is_source=True, deadline_s=0.2)
    target = open_end(tmp_path, 0, is_source=False, deadline_s=0.2)
    with pytest.raises(TransportError, match=r"server rank 0 has not read a bucket within 0.2 s"):
        source.send(make_buckets(1), lambda *_: None)
    target.receive(make_buckets(1)[:2], lambda *_: None)
    with pytest.raises(TransportError, match=r"training rank 0 has filled no bucket within 0.2 s"):
        target.receive(make_buckets(1), lambda *_: None)
    target.close()
    with pytest.raises(TransportError, match="server rank 0 has not read its last bucket when the sync was aborted"):
        source.send(make_buckets(1)[:1], lambda *_: None)
    source.close()


def test_a_training_rank_frees_its_memory_only_after_the_server_ranks_have_unmapped_it(tmp_path: Path) -> None:
    source = open_end(tmp_path, 0, is_source=True)
    target = open_end(tmp_path, 0, is_source=False)
    threading.Timer(0.3, target.close).start()
    source.close()  # HostBuffer.close asserts it
    assert MappedHostBuffer.num_open == 0


def test_a_refused_mapping_names_the_handle_of_the_training_rank(tmp_path: Path) -> None:
    source = open_end(tmp_path, 0, is_source=True)
    (tmp_path / "ring" / "handle").write_text((b"/proc/nobody".ljust(64, b"\0")).hex())
    with pytest.raises(TransportError, match="ring/handle: CUDA_ERROR_INVALID_VALUE"):
        open_end(tmp_path, 0, is_source=False)
    source.close()


def test_a_server_rank_accepts_memory_whose_pattern_it_reads_and_says_what_it_cannot_read() -> None:
    trial, other = Trial(CPU, GPU), Trial(CPU, GPU)
    assert find_refusal({3: trial.offer, 4: other.offer}, CPU, GPU) is None
    swapped = trial.offer | {"pattern": other.offer["pattern"]}
    assert find_refusal({3: swapped}, CPU, GPU) == "training rank 3's memory has other contents here"
    handle = trial.offer["handle"]
    trial.close()
    other.close()
    refusal = find_refusal({5: {"handle": handle, "pattern": ""}}, CPU, GPU)
    assert refusal == "training rank 5's memory: CUDA_ERROR_INVALID_VALUE"
    assert "non-hexadecimal" in str(find_refusal({5: {"handle": "/etc/passwd", "pattern": ""}}, CPU, GPU))


def test_cuda_ipc_is_the_way_unless_a_rank_refuses_and_plain_memory_without_gpus() -> None:
    assert choose_way(True, [])[0] is Way.ipc
    assert choose_way(True, ["server rank 1: no", "server rank 2: no"]) == (Way.pinned, "server rank 1: no")
    assert choose_way(False, [])[0] is Way.pageable


def test_processes_of_one_machine_that_see_the_same_shared_memory_name_the_same_node() -> None:
    assert find_node() == find_node()
    boot, device = find_node().split("/")
    assert len(boot) == 36
    assert int(device) == os.stat("/dev/shm").st_dev
