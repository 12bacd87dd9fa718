"""Buckets between processes over shared memory and a process group: more than slots, and with ends that are missing."""

import os
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

from megarl.sync.plan import Bucket, Copy, TensorSlice
from megarl.sync.transport import BucketTransport, GroupTransport, TransportError, open_transport, without_watchdog

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
    transport = open_transport(spec, rank, is_source=is_source, device=torch.device("cpu"), peers=range(NUM_SOURCES))
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
    memory = {"way": "pageable", "directories": directories, "slot_bytes": 64}
    group = {"file": str(directory / "store"), "host": "127.0.0.1"}
    # As on two nodes with a training rank and a server rank each.
    far = {"far": [[[0, 1]], [[1, 0]]]}
    return common | {"kind": kind} | {"memory": memory, "group": group, "mixed": memory | group | far}[kind]


@pytest.mark.parametrize("kind", ["memory", "group", "mixed"])
def test_every_bucket_arrives_whole_and_in_order_time_after_time(kind: str, tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(
        run_end, (make_spec(kind, tmp_path), tmp_path), nprocs=NUM_SOURCES + NUM_TARGETS, start_method="spawn"
    )
    for rank in range(NUM_TARGETS):
        wanted = [(b.source, b.num_bytes) for b in make_buckets() if b.target == rank]
        assert torch.load(tmp_path / f"{rank}.pt", weights_only=True) == wanted * 2


def take_own(source: int, target: int) -> list[Bucket]:
    return [bucket for bucket in make_buckets() if (bucket.source, bucket.target) == (source, target)]


def open_end(directory: Path, *, is_source: bool, deadline_s: float) -> BucketTransport:
    """Of training rank 0 or of server rank 0, to each other alone."""
    spec = make_spec("memory", directory, deadline_s)
    return open_transport(spec, 0, is_source=is_source, device=torch.device("cpu"), peers=[0])


def test_ends_in_shared_memory_that_do_nothing_are_named_at_the_deadline(tmp_path: Path) -> None:
    source = open_end(tmp_path, is_source=True, deadline_s=0.2)
    target = open_end(tmp_path, is_source=False, deadline_s=0.2)
    with pytest.raises(TransportError, match=r"training rank 0 has filled no bucket within 0.2 s"):
        target.receive(take_own(0, 0), pytest.fail)
    with pytest.raises(TransportError, match=r"server rank 0 has not read a bucket within 0.2 s"):
        source.send(take_own(0, 0), lambda bucket, message: message.zero_())
    with pytest.raises(TransportError, match=r"server rank 0 has not read its last bucket within 0.2 s"):
        open_end(tmp_path, is_source=True, deadline_s=0.2).send(take_own(0, 0)[:2], lambda *_: None)


def test_memory_that_a_training_rank_has_not_made_is_named_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match=r"training rank 0 has not made its memory .*ring-0 within 0.2 s"):
        open_end(tmp_path, is_source=False, deadline_s=0.2)


@pytest.mark.parametrize("closes", ["owner", "other end"])
def test_a_wait_in_shared_memory_ends_when_the_sync_is_given_up(closes: str, tmp_path: Path) -> None:
    source = open_end(tmp_path, is_source=True, deadline_s=30.0)
    target = open_end(tmp_path, is_source=False, deadline_s=30.0)
    end = shutil.rmtree if closes == "owner" else lambda _: source.close()
    threading.Timer(0.3, end, (tmp_path / "ring-0",)).start()
    with pytest.raises(TransportError, match="training rank 0 has filled no bucket when the sync was aborted"):
        target.receive(take_own(0, 0), pytest.fail)


def test_the_names_of_the_slots_are_gone_after_the_first_sync_so_that_they_end_with_the_processes(
    tmp_path: Path,
) -> None:
    source = open_end(tmp_path, is_source=True, deadline_s=30.0)
    target = open_end(tmp_path, is_source=False, deadline_s=30.0)
    assert (tmp_path / "ring-0" / "slots").exists()
    for _ in range(2):
        thread = threading.Thread(target=target.receive, args=(take_own(0, 0), lambda *_: None))
        thread.start()
        source.send(take_own(0, 0), lambda bucket, message: message.zero_())
        thread.join()
        assert sorted(path.name for path in (tmp_path / "ring-0").iterdir()) == ["counters"]


def test_a_group_that_does_not_meet_is_an_error_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="the 4 ranks of the weight sync did not all join"):
        open_transport(make_spec("group", tmp_path, 1.0), 0, is_source=True, device=torch.device("cpu"))


def open_pair(directory: Path, deadline_s: float) -> tuple[GroupTransport, GroupTransport]:
    """Training rank 0 and server rank 0 of a group of two, in threads of this process."""
    spec = make_spec("group", directory, deadline_s) | {"num_sources": 1, "num_targets": 1}
    with ThreadPoolExecutor(2) as pool:
        ends = list(
            pool.map(
                lambda is_source: GroupTransport(spec, 0, is_source=is_source, device=torch.device("cpu")),
                (True, False),
            )
        )
    return ends[0], ends[1]


def test_a_rank_that_sends_nothing_is_named_at_our_deadline_long_before_the_groups_own_timeout(tmp_path: Path) -> None:
    source, target = open_pair(tmp_path, deadline_s=2.0)
    for end in (source, target):
        assert end._group.options._timeout == timedelta(seconds=20)
    with pytest.raises(TransportError, match=r"a bucket was not received from training rank 0: .*2000ms"):
        target.receive(take_own(0, 0), lambda *_: None)


def test_a_rank_that_is_lost_is_named(tmp_path: Path) -> None:
    source, target = open_pair(tmp_path, deadline_s=30.0)
    target.close()
    with pytest.raises(TransportError, match="a bucket was not sent to server rank 0"):
        source.send(take_own(0, 0), lambda bucket, message: message.zero_())


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
    transport = open_transport(spec, 0, is_source=True, device=torch.device("cpu"))
    found = {c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN} - before
    assert {address.ip for address in found} <= {"127.0.0.1", "::1"}
    transport.close()
    assert socket.gethostbyname("localhost") == "127.0.0.1"
