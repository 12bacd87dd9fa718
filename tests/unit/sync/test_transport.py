"""Buckets between processes over shared memory and a process group: more than slots, and with ends that are missing."""

import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

from megarl.sync.plan import Bucket, Copy
from megarl.sync.slices import TensorSlice
from megarl.sync.transport import TransportError, open_transport

NUM_SOURCES, NUM_TARGETS = 2, 2


def make_buckets() -> list[Bucket]:
    """Five for each pair of ranks, of different sizes; pairs take turns."""
    return [
        Bucket(
            source, target, (Copy("w", TensorSlice(turn, 0, 1, 4 + turn), "w", TensorSlice(turn, 0, 1, 4 + turn), 4),)
        )
        for turn in range(5)
        for source in range(NUM_SOURCES)
        for target in range(NUM_TARGETS)
    ]


def expected_bytes(bucket: Bucket) -> torch.Tensor:
    return torch.full((bucket.num_bytes,), 16 * bucket.source + bucket.target + bucket.num_bytes, dtype=torch.uint8)


def run_end(number: int, spec: dict[str, Any], out: Path) -> None:
    is_source = number < NUM_SOURCES
    rank = number if is_source else number - NUM_SOURCES
    transport = open_transport(spec, rank, is_source=is_source, device=torch.device("cpu"))
    if is_source:
        own = [bucket for bucket in make_buckets() if bucket.source == rank]
        for _ in range(2):
            transport.send(own, lambda bucket, message: message.copy_(expected_bytes(bucket)))
    else:
        own = [bucket for bucket in make_buckets() if bucket.target == rank]
        received = []
        for _ in range(2):
            for bucket, message in transport.receive(own):
                assert torch.equal(message, expected_bytes(bucket))
                received.append((bucket.source, bucket.num_bytes))
        torch.save(received, out / f"{rank}.pt")
    transport.close()


def make_spec(kind: str, directory: Path, deadline_s: float = 30.0) -> dict[str, Any]:
    common = {"num_sources": NUM_SOURCES, "num_targets": NUM_TARGETS, "deadline_s": deadline_s}
    if kind == "memory":
        return common | {"kind": kind, "directory": str(directory), "slot_bytes": 64}
    return common | {"kind": "group", "file": str(directory / "store"), "host": "127.0.0.1"}


@pytest.mark.parametrize("kind", ["memory", "group"])
def test_every_bucket_arrives_whole_and_in_order_time_after_time(kind: str, tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(
        run_end, (make_spec(kind, tmp_path), tmp_path), nprocs=NUM_SOURCES + NUM_TARGETS, start_method="spawn"
    )
    for rank in range(NUM_TARGETS):
        wanted = [(b.source, b.num_bytes) for b in make_buckets() if b.target == rank]
        assert torch.load(tmp_path / f"{rank}.pt", weights_only=True) == wanted * 2


@pytest.mark.parametrize("is_source", [True, False])
def test_an_end_in_shared_memory_that_is_missing_is_named_at_the_deadline(is_source: bool, tmp_path: Path) -> None:
    transport = open_transport(make_spec("memory", tmp_path, 0.2), 0, is_source=is_source, device=torch.device("cpu"))
    buckets = make_buckets()
    if is_source:
        with pytest.raises(TransportError, match=r"server rank 0 has read none of 2 buckets within 0.2 s"):
            transport.send([b for b in buckets if b.source == b.target == 0], lambda bucket, message: message.zero_())
    else:
        with pytest.raises(TransportError, match=r"training rank 0 has filled no bucket within 0.2 s"):
            list(transport.receive([b for b in buckets if b.source == b.target == 0]))


def test_a_wait_in_shared_memory_ends_when_the_sync_is_given_up(tmp_path: Path) -> None:
    directory = tmp_path / "memory"
    directory.mkdir()
    transport = open_transport(make_spec("memory", directory, 30.0), 0, is_source=False, device=torch.device("cpu"))
    threading.Timer(0.3, shutil.rmtree, (directory,)).start()
    with pytest.raises(TransportError, match="training rank 0 has filled no bucket when the sync was aborted"):
        list(transport.receive([b for b in make_buckets() if b.source == b.target == 0]))


def test_a_group_that_does_not_meet_is_an_error_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="the 4 ranks of the weight sync did not all join"):
        open_transport(make_spec("group", tmp_path, 1.0), 0, is_source=True, device=torch.device("cpu"))


def test_a_group_of_loopback_listens_on_loopback_alone(tmp_path: Path) -> None:
    import psutil

    spec = make_spec("group", tmp_path) | {"num_sources": 1, "num_targets": 0}
    before = {c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
    transport = open_transport(spec, 0, is_source=True, device=torch.device("cpu"))
    found = {c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN} - before
    assert {address.ip for address in found} <= {"127.0.0.1", "::1"}
    transport.close()
    assert socket.gethostbyname("localhost") == "127.0.0.1"
