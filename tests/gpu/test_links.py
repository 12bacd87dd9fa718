"""Buckets between two processes on one GPU by each way, and what an NCCL group of the weight sync starts."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

from megarl.sync.plan import Bucket, Copy, TensorSlice
from megarl.sync.transport import open_transport

pytestmark = pytest.mark.gpu

SLOT_BYTES = 8 << 20
NUM_BUCKETS, NUM_SYNCS = 7, 2


def make_buckets() -> list[Bucket]:
    """Of different sizes, the last one as large as a slot."""
    rows = [(number + 1) * SLOT_BYTES // NUM_BUCKETS // 4096 for number in range(NUM_BUCKETS)]
    slices = [TensorSlice(0, 0, num_rows, 1024) for num_rows in rows]
    return [Bucket(0, 0, (Copy("w", each, "w", each, 4),)) for each in slices]


def expect(bucket: Bucket) -> torch.Tensor:
    return (torch.arange(bucket.num_bytes, device="cuda") % 251).to(torch.uint8)


def run_end(number: int, spec: dict[str, Any], out: Path) -> None:
    """Training rank 0 and server rank 0, both on GPU 0."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    transport = open_transport(spec, 0, is_source=number == 0, device=device, peers=[0])
    sizes = []

    def take(bucket: Bucket, message: torch.Tensor) -> None:
        assert message.device == device
        assert torch.equal(message, expect(bucket))
        sizes.append(bucket.num_bytes)

    for _ in range(NUM_SYNCS):
        if number == 0:
            transport.send(make_buckets(), lambda bucket, message: message.copy_(expect(bucket)))
        else:
            transport.receive(make_buckets(), take)
    transport.close()
    if number == 1:
        torch.save(sizes, out / "sizes.pt")


@pytest.mark.parametrize("allocator", ["", "expandable_segments:True"])
def test_buckets_arrive_whole_between_two_processes_on_one_gpu_whatever_torchs_allocator_does(
    allocator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", allocator)
    directory = Path(f"/dev/shm/megarl-sync-{os.getpid()}-links")
    spec = {"kind": "memory", "directories": [str(directory)], "slot_bytes": SLOT_BYTES, "far": []}
    spec |= {"num_sources": 1, "num_targets": 1, "deadline_s": 60.0}
    torch.multiprocessing.start_processes(run_end, (spec, tmp_path), nprocs=2, start_method="spawn")
    wanted = [bucket.num_bytes for bucket in make_buckets()] * NUM_SYNCS
    assert torch.load(tmp_path / "sizes.pt", weights_only=True) == wanted
    assert not directory.exists()


def test_a_handle_of_no_memory_is_refused_and_torch_goes_on() -> None:
    from megarl.sync.gpu_memory import GpuMemoryError, MappedBuffer

    with pytest.raises(GpuMemoryError, match="CUDA refuses to map another process's memory: CUDA_ERROR"):
        MappedBuffer(bytes(64), torch.device("cuda", 0))
    assert float(torch.ones(3, device="cuda").sum()) == 3.0


def test_an_nccl_group_of_the_sync_has_no_watchdog_and_all_its_ranks_share_one_communicator(tmp_path: Path) -> None:
    spec = {"kind": "group", "file": str(tmp_path / "store"), "host": "127.0.0.1", "deadline_s": 60.0}
    spec |= {"num_sources": 1, "num_targets": 0}
    transport = open_transport(spec, 0, is_source=True, device=torch.device("cuda", 0))
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert not [name for name in names if name.startswith("pt_nccl_watchd")]
    transport.close()
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
