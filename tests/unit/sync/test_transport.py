"""Buckets between ranks, over a group and through memory: their way, order, deadlines, and ends that are missing.

In place of a GPU's memory that another process maps stands host memory.
"""

import mmap
import os
import shutil
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from megarl.sync.plan import Bucket, Copy, TensorSlice
from megarl.sync.ranks import Session
from megarl.sync.transport import GroupTransport, MemoryTransport, TransportError, open_transport

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


def make_spec(kind: str, directory: Path, deadline_s: float = 30.0) -> dict[str, Any]:
    common = {"num_sources": NUM_SOURCES, "num_targets": NUM_TARGETS, "deadline_s": deadline_s}
    directories = [str(directory / f"ring-{source}") for source in range(NUM_SOURCES)]
    memory = {"kind": "memory", "directories": directories, "slot_bytes": 64, "far": []}
    group = {"file": str(directory / "store"), "host": "127.0.0.1"}
    # As on two nodes with a training rank and a server rank each.
    far = {"far": [[[0, 1]], [[1, 0]]]}
    return common | {"memory": memory, "group": {"kind": "group"} | group, "mixed": memory | group | far}[kind]


class HostMemoryError(RuntimeError):
    """In place of GpuMemoryError."""


class HostBuffer:
    """In place of SharedBuffer: memory of this process, named by a handle of 64 bytes."""

    open: ClassVar[list[str]] = []

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._file = os.memfd_create("buffer")
        os.truncate(self._file, num_bytes)
        self.bytes = torch.frombuffer(mmap.mmap(self._file, num_bytes), dtype=torch.uint8)
        self._path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.handle = self._path.encode().ljust(64, b"\0")
        HostBuffer.open.append(self._path)

    def finish(self) -> None:
        pass

    def close(self) -> None:
        assert self._path not in MappedHostBuffer.open, "memory that another end maps was freed"
        os.close(self._file)
        HostBuffer.open.remove(self._path)


class MappedHostBuffer:
    open: ClassVar[list[str]] = []

    def __init__(self, handle: bytes, device: torch.device) -> None:
        self._path = handle.rstrip(b"\0").decode()
        if not Path(self._path).exists():
            raise HostMemoryError("CUDA_ERROR_INVALID_VALUE")
        with Path(self._path).open("r+b") as file:
            self._bytes = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        MappedHostBuffer.open.append(self._path)

    def copy_to(self, out: torch.Tensor, start: int) -> None:
        out.copy_(self._bytes[start : start + out.numel()])

    def close(self) -> None:
        MappedHostBuffer.open.remove(self._path)


GPU: Any = SimpleNamespace(SharedBuffer=HostBuffer, MappedBuffer=MappedHostBuffer, GpuMemoryError=HostMemoryError)


@pytest.fixture(autouse=True)
def all_closed() -> Iterator[None]:
    yield
    assert (HostBuffer.open, MappedHostBuffer.open) == ([], [])


def open_end(directory: Path, way: str, rank: int = 0, *, is_source: bool, deadline_s: float = 30.0) -> MemoryTransport:
    """Of training rank 0 or of a server rank."""
    spec = {"directories": [str(directory / "ring")], "slot_bytes": 64, "num_targets": 1, "deadline_s": deadline_s}
    gpu = GPU if way == "ipc" else None
    return MemoryTransport(spec, rank, is_source=is_source, device=CPU, peers=[0], gpu=gpu)


@pytest.mark.parametrize("kind", ["memory", "ipc", "group", "mixed"])
def test_every_bucket_arrives_whole_and_in_order_time_after_time_and_the_slots_lose_their_names(
    kind: str, tmp_path: Path
) -> None:
    """The names are gone after the first sync, so that the slots end with the processes."""
    spec = make_spec("memory" if kind == "ipc" else kind, tmp_path)
    received: list[list[tuple[int, int]]] = [[] for _ in range(NUM_TARGETS)]

    def check_names() -> None:
        assert {path.name for path in tmp_path.glob("ring-*/*")} <= {"counters"}

    # Checks while all ends wait, so that none of them makes or removes a file meanwhile.
    together = threading.Barrier(NUM_SOURCES + NUM_TARGETS, check_names)

    def take(bucket: Bucket, message: torch.Tensor) -> None:
        assert torch.equal(message, expected_bytes(bucket))
        received[bucket.target].append((bucket.source, bucket.num_bytes))

    def run_end(number: int) -> None:
        is_source = number < NUM_SOURCES
        rank = number if is_source else number - NUM_SOURCES
        own = [bucket for bucket in make_buckets() if (bucket.source if is_source else bucket.target) == rank]
        keys: dict[str, Any] = {"is_source": is_source, "device": CPU, "peers": range(NUM_SOURCES)}
        opened = MemoryTransport(spec, rank, **keys, gpu=GPU) if kind == "ipc" else open_transport(spec, rank, **keys)
        for _ in range(2):
            if is_source:
                opened.send(own, lambda bucket, message: message.copy_(expected_bytes(bucket)))
            else:
                opened.receive(own, take)
            together.wait(30)
        opened.close()

    with ThreadPoolExecutor(NUM_SOURCES + NUM_TARGETS) as pool:
        list(pool.map(run_end, range(NUM_SOURCES + NUM_TARGETS)))
    for rank, found in enumerate(received):
        assert found == [(b.source, b.num_bytes) for b in make_buckets() if b.target == rank] * 2


@pytest.mark.parametrize("way", ["host", "ipc"])
def test_an_end_in_memory_that_is_lost_is_named_at_the_deadline_and_its_memory_is_freed(
    way: str, tmp_path: Path
) -> None:
    with pytest.raises(TransportError, match=r"training rank 0 has not made its memory .*ring within 0.2 s"):
        open_end(tmp_path, way, is_source=False, deadline_s=0.2)
    source = open_end(tmp_path, way, is_source=True, deadline_s=0.2)
    target = open_end(tmp_path, way, is_source=False, deadline_s=0.2)
    own = take_own(0, 0)
    with pytest.raises(TransportError, match=r"training rank 0 has filled no bucket within 0.2 s"):
        target.receive(own, pytest.fail)
    with pytest.raises(TransportError, match=r"server rank 0 has not read a bucket within 0.2 s"):
        source.send(own, lambda *_: None)
    target.receive(own[:1], lambda *_: None)
    with pytest.raises(TransportError, match=r"server rank 0 has not read its last bucket within 0.2 s"):
        source.send(own[:1], lambda *_: None)
    target.close()
    with pytest.raises(TransportError, match=r"server rank 0 has not read .* when the sync was aborted"):
        source.send(own[:1], lambda *_: None)
    source.close()


@pytest.mark.parametrize("closes", ["owner", "other end"])
def test_a_wait_in_shared_memory_ends_when_the_sync_is_given_up(closes: str, tmp_path: Path) -> None:
    source, target = (open_end(tmp_path, "host", is_source=is_source) for is_source in (True, False))
    end = shutil.rmtree if closes == "owner" else lambda _: source.close()
    threading.Timer(0.3, end, (tmp_path / "ring",)).start()
    with pytest.raises(TransportError, match="training rank 0 has filled no bucket when the sync was aborted"):
        target.receive(take_own(0, 0), pytest.fail)


def test_a_training_rank_frees_its_memory_once_it_is_unmapped_and_a_refused_mapping_names_its_handle(
    tmp_path: Path,
) -> None:
    source, target = (open_end(tmp_path, "ipc", is_source=is_source) for is_source in (True, False))
    (tmp_path / "ring" / "handle").write_text((b"/proc/nobody".ljust(64, b"\0")).hex())
    with pytest.raises(TransportError, match=r"ring/handle: CUDA_ERROR_INVALID_VALUE; rollout\.transport=disk"):
        open_end(tmp_path, "ipc", is_source=False)
    threading.Timer(0.3, target.close).start()
    source.close()  # HostBuffer.close asserts it
    assert MappedHostBuffer.open == []


def test_a_group_that_does_not_meet_and_a_rank_that_sends_nothing_are_errors_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="the 4 ranks of the weight sync did not all join"):
        open_transport(make_spec("group", tmp_path, 1.0), 0, is_source=True, device=CPU)
    spec = make_spec("group", tmp_path / "b", 2.0) | {"num_sources": 1, "num_targets": 1}
    (tmp_path / "b").mkdir()
    with ThreadPoolExecutor(2) as pool:
        ends = pool.map(lambda is_source: GroupTransport(spec, 0, is_source=is_source, device=CPU), (True, False))
    _source, target = ends
    # Ours is long before the group's own.
    assert target._group.options._timeout == timedelta(seconds=20)
    with pytest.raises(TransportError, match=r"a bucket was not received from training rank 0: .*2000ms"):
        target.receive(take_own(0, 0), lambda *_: None)


def test_nccl_is_polled_until_the_deadline_and_waited_for_once_it_is_complete() -> None:
    transport: Any = GroupTransport.__new__(GroupTransport)
    transport._timeout, transport._device = timedelta(seconds=0.05), torch.device("cuda")
    asked: list[str] = []

    def is_completed() -> bool:
        asked.append("is it complete?")
        return len(asked) == 5

    # Torch's own wait would poll every 10 ms.
    work = SimpleNamespace(is_completed=is_completed, wait=lambda: asked.append("wait"))
    transport._wait((make_bucket(0, 0, 1), work), "sent to")
    assert asked == ["is it complete?"] * 5 + ["wait"]
    with pytest.raises(RuntimeError, match=r"a bucket was not sent to server rank 0: not within 0.05 s"):
        transport._wait((make_bucket(0, 0, 1), work), "sent to")


def test_a_group_of_loopback_listens_on_loopback_alone(tmp_path: Path) -> None:
    import psutil

    spec = make_spec("group", tmp_path) | {"num_sources": 1, "num_targets": 0}
    before = {c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
    transport = open_transport(spec, 0, is_source=True, device=CPU)
    found = {c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN} - before
    assert {address.ip for address in found} <= {"127.0.0.1", "::1"}
    transport.close()
    assert socket.gethostbyname("localhost") == "127.0.0.1"


def make_session(nodes: tuple[Sequence[str], Sequence[str]], pairs: Sequence[tuple[int, int]]) -> Session:
    buckets = [make_bucket(*pair, 10) for pair in pairs]
    copies = {(bucket.source, bucket.target): bucket.copies for bucket in buckets}
    pids = [100 + source for source in range(len(nodes[0]))]
    return Session(copies, buckets, 40, (len(nodes[0]), len(nodes[1])), nodes, pids)


TWO_NODES = make_session((["a", "b"], ["a", "b"]), [(0, 0), (0, 1), (1, 0), (1, 1)])


def test_pairs_of_ranks_on_two_nodes_are_far_and_those_of_a_node_of_servers_together() -> None:
    assert (TWO_NODES.near, TWO_NODES.far) == ([(0, 0), (1, 1)], [[(0, 1)], [(1, 0)]])
    three = make_session((["a", "b", "c"], ["b", "b", "c"]), [(s, t) for s in range(3) for t in range(3)])
    assert three.far == [[(0, 0), (0, 1), (2, 0), (2, 1)], [(0, 2), (1, 2)]]
    for pairs in three.far:
        training, serving = ({three.nodes[side][pair[side]] for pair in pairs} for side in range(2))
        assert not training & serving
