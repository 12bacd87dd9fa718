"""Buckets between ranks, over a process group and through memory: order, deadlines, and ends that are missing.

In place of a GPU's memory that another process maps stands host memory.
"""

import mmap
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing

from megarl.sync.plan import Bucket, Copy, TensorSlice
from megarl.sync.transport import (
    GroupTransport,
    MemoryTransport,
    TransportError,
    open_transport,
    without_watchdog,
)

CPU = torch.device("cpu")
NUM_SOURCES, NUM_TARGETS = 2, 2


def make_bucket(source: int, target: int, size: int) -> Bucket:
    """Of 4 `size` bytes."""
    return Bucket(source, target, (Copy("w", TensorSlice(0, 0, 1, size), "w", TensorSlice(0, 0, 1, size), 4),))


def make_buckets() -> list[Bucket]:
    """Five for each pair of ranks, of different sizes; pairs take turns."""
    pairs = [(source, target) for source in range(NUM_SOURCES) for target in range(NUM_TARGETS)]
    return [make_bucket(source, target, 4 + turn) for turn in range(5) for source, target in pairs]


def take_own(source: int, target: int) -> list[Bucket]:
    return [bucket for bucket in make_buckets() if (bucket.source, bucket.target) == (source, target)]


def expected_bytes(bucket: Bucket) -> torch.Tensor:
    return torch.full((bucket.num_bytes,), 16 * bucket.source + bucket.target + bucket.num_bytes, dtype=torch.uint8)


def run_end(number: int, spec: dict[str, Any], out: Path) -> None:
    is_source = number < NUM_SOURCES
    rank = number if is_source else number - NUM_SOURCES
    transport = open_transport(spec, rank, is_source=is_source, device=CPU, peers=range(NUM_SOURCES))
    if is_source:
        own = [bucket for bucket in make_buckets() if bucket.source == rank]
        for _ in range(2):
            transport.send(own, lambda bucket, message: message.copy_(expected_bytes(bucket)))
    else:
        own = [bucket for bucket in make_buckets() if bucket.target == rank]
        received = []

        def take(bucket: Bucket, message: torch.Tensor) -> None:
            assert torch.equal(message, expected_bytes(bucket))
            received.append((bucket.source, bucket.num_bytes))

        for _ in range(2):
            transport.receive(own, take)
        torch.save(received, out / f"{rank}.pt")
    transport.close()


def make_spec(kind: str, directory: Path, deadline_s: float = 30.0) -> dict[str, Any]:
    common = {"num_sources": NUM_SOURCES, "num_targets": NUM_TARGETS, "deadline_s": deadline_s}
    directories = [str(directory / f"ring-{source}") for source in range(NUM_SOURCES)]
    memory = {"kind": "memory", "directories": directories, "slot_bytes": 64, "far": []}
    group = {"file": str(directory / "store"), "host": "127.0.0.1"}
    # As on two nodes with a training rank and a server rank each.
    far = {"far": [[[0, 1]], [[1, 0]]]}
    return common | {"memory": memory, "group": {"kind": "group"} | group, "mixed": memory | group | far}[kind]


@pytest.mark.parametrize("kind", ["memory", "group", "mixed"])
def test_every_bucket_arrives_whole_and_in_order_time_after_time(kind: str, tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(
        run_end, (make_spec(kind, tmp_path), tmp_path), nprocs=NUM_SOURCES + NUM_TARGETS, start_method="spawn"
    )
    for rank in range(NUM_TARGETS):
        wanted = [(b.source, b.num_bytes) for b in make_buckets() if b.target == rank]
        assert torch.load(tmp_path / f"{rank}.pt", weights_only=True) == wanted * 2


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


def open_end(
    directory: Path, way: str, rank: int = 0, *, is_source: bool, num_targets: int = 1, deadline_s: float = 30.0
) -> MemoryTransport:
    """Of training rank 0 or of a server rank."""
    spec = {"directories": [str(directory / "ring")], "slot_bytes": 64, "num_targets": num_targets}
    gpu = GPU if way == "ipc" else None
    spec["deadline_s"] = deadline_s
    return MemoryTransport(spec, rank, is_source=is_source, device=CPU, peers=[0], gpu=gpu)


@pytest.mark.parametrize("way", ["host", "ipc"])
def test_buckets_through_memory_arrive_in_order_time_after_time_and_the_slots_lose_their_names(
    way: str, tmp_path: Path
) -> None:
    """The names are gone after the first sync, so that the slots end with the processes."""
    buckets = [make_bucket(0, target, turn + 1) for turn in range(6) for target in range(2)]
    source = open_end(tmp_path, way, is_source=True, num_targets=2)
    targets = [open_end(tmp_path, way, rank, is_source=False, num_targets=2) for rank in range(2)]
    received: list[list[tuple[int, bytes]]] = [[], []]
    assert len(list((tmp_path / "ring").iterdir())) == 2

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
        assert [path.name for path in (tmp_path / "ring").iterdir()] == ["counters"]
    for rank in range(2):
        sizes = [4 * turn for turn in range(1, 7)] * 2
        assert received[rank] == [(size, bytes([100 * rank + size]) * size) for size in sizes]
    for end in (*targets, source):
        end.close()


@pytest.mark.parametrize("way", ["host", "ipc"])
def test_an_end_in_memory_that_is_lost_is_named_at_the_deadline_and_its_memory_is_freed(
    way: str, tmp_path: Path
) -> None:
    with pytest.raises(TransportError, match=r"training rank 0 has not made its memory .*ring within 0.2 s"):
        open_end(tmp_path, way, is_source=False, deadline_s=0.2)
    source = open_end(tmp_path, way, is_source=True, deadline_s=0.2)
    target = open_end(tmp_path, way, is_source=False, deadline_s=0.2)
    with pytest.raises(TransportError, match=r"training rank 0 has filled no bucket within 0.2 s"):
        target.receive(take_own(0, 0), pytest.fail)
    with pytest.raises(TransportError, match=r"server rank 0 has not read a bucket within 0.2 s"):
        source.send(take_own(0, 0), lambda *_: None)
    target.receive(take_own(0, 0)[:1], lambda *_: None)
    with pytest.raises(TransportError, match=r"server rank 0 has not read its last bucket within 0.2 s"):
        source.send(take_own(0, 0)[:1], lambda *_: None)
    target.close()
    with pytest.raises(TransportError, match=r"server rank 0 has not read .* when the sync was aborted"):
        source.send(take_own(0, 0)[:1], lambda *_: None)
    source.close()


@pytest.mark.parametrize("closes", ["owner", "other end"])
def test_a_wait_in_shared_memory_ends_when_the_sync_is_given_up(closes: str, tmp_path: Path) -> None:
    source, target = (open_end(tmp_path, "host", is_source=is_source) for is_source in (True, False))
    end = shutil.rmtree if closes == "owner" else lambda _: source.close()
    threading.Timer(0.3, end, (tmp_path / "ring",)).start()
    with pytest.raises(TransportError, match="training rank 0 has filled no bucket when the sync was aborted"):
        target.receive(take_own(0, 0), pytest.fail)


def test_a_training_rank_frees_its_memory_only_after_the_server_ranks_have_unmapped_it(tmp_path: Path) -> None:
    source, target = (open_end(tmp_path, "ipc", is_source=is_source) for is_source in (True, False))
    threading.Timer(0.3, target.close).start()
    source.close()  # HostBuffer.close asserts it
    assert MappedHostBuffer.num_open == 0


def test_a_refused_mapping_names_the_handle_of_the_training_rank(tmp_path: Path) -> None:
    source = open_end(tmp_path, "ipc", is_source=True)
    (tmp_path / "ring" / "handle").write_text((b"/proc/nobody".ljust(64, b"\0")).hex())
    with pytest.raises(TransportError, match=r"ring/handle: CUDA_ERROR_INVALID_VALUE; rollout\.transport=disk"):
        open_end(tmp_path, "ipc", is_source=False)
    source.close()


def test_a_group_that_does_not_meet_is_an_error_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="the 4 ranks of the weight sync did not all join"):
        open_transport(make_spec("group", tmp_path, 1.0), 0, is_source=True, device=CPU)


def test_a_rank_that_sends_nothing_is_named_at_our_deadline_long_before_the_groups_own_timeout(tmp_path: Path) -> None:
    spec = make_spec("group", tmp_path, 2.0) | {"num_sources": 1, "num_targets": 1}
    with ThreadPoolExecutor(2) as pool:
        ends = pool.map(lambda is_source: GroupTransport(spec, 0, is_source=is_source, device=CPU), (True, False))
    source, target = ends
    for end in (source, target):
        assert end._group.options._timeout == timedelta(seconds=20)
    with pytest.raises(TransportError, match=r"a bucket was not received from training rank 0: .*2000ms"):
        target.receive(take_own(0, 0), lambda *_: None)


class PolledWork:
    """NCCL's work as `GroupTransport` polls it: complete when asked for the n-th time."""

    def __init__(self, n: int) -> None:
        self.left, self.has_waited = n, False

    def is_completed(self) -> bool:
        self.left -= 1
        return self.left <= 0

    def wait(self) -> None:
        assert self.left <= 0, "torch's own wait would poll every 10 ms"
        self.has_waited = True


def test_nccl_is_polled_until_the_deadline_and_waited_for_once_it_is_complete() -> None:
    transport: Any = GroupTransport.__new__(GroupTransport)
    transport._timeout, transport._device = timedelta(seconds=0.05), torch.device("cuda")
    work, bucket = PolledWork(5), make_bucket(0, 0, 1)
    transport._wait((bucket, work), "sent to")
    assert work.has_waited
    with pytest.raises(RuntimeError, match=r"a bucket was not sent to server rank 0: not within 0.05 s"):
        transport._wait((bucket, PolledWork(10**9)), "sent to")


@pytest.mark.parametrize("before", [None, "0"])
def test_torchs_watchdog_is_off_while_a_group_of_the_sync_is_made_and_no_longer(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TORCH_NCCL_BLOCKING_WAIT"
    monkeypatch.setenv(name, before or "")
    if before is None:
        monkeypatch.delenv(name)
    with without_watchdog():
        assert os.environ[name] == "1"
    assert os.environ.get(name) == before


def test_a_group_of_loopback_listens_on_loopback_alone(tmp_path: Path) -> None:
    import psutil

    spec = make_spec("group", tmp_path) | {"num_sources": 1, "num_targets": 0}
    before = {c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
    transport = open_transport(spec, 0, is_source=True, device=CPU)
    found = {c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN} - before
    assert {address.ip for address in found} <= {"127.0.0.1", "::1"}
    transport.close()
    assert socket.gethostbyname("localhost") == "127.0.0.1"
