"""Storages in host memory and back, and the FP8 copies that are dropped meanwhile. On a GPU: tests/gpu."""

import pytest
import torch

import megarl.mcore  # noqa: F401
from megarl.mcore import offload
from megarl.mcore.offload import StorageOffloader, drop_fp8_weights, find_storages


def build_tensors(*sizes: int) -> list[torch.Tensor]:
    return [torch.randn(size) for size in sizes]


@pytest.mark.parametrize("sizes", [(7,), (16, 16, 16), (100, 3, 64), (1, 0, 2000)])
def test_storages_come_back_bit_by_bit_whatever_the_pieces(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "PIECE_BYTES", 64)
    offloader = StorageOffloader()
    for extra in (0, 5, 0):
        tensors = build_tensors(*sizes, *[9] * extra)
        expected = [tensor.clone() for tensor in tensors]
        offloader.park(find_storages(tensors))
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        offloader.bring()
        assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, expected, strict=True))


def test_host_memory_is_of_the_storages_size_in_pieces_that_are_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch rounds pinned memory up to powers of two: 70 GiB in one piece would be 128."""
    monkeypatch.setattr(offload, "PIECE_BYTES", 64)
    offloader, tensors = StorageOffloader(), build_tensors(70, 65)
    for _ in range(2):
        offloader.park(find_storages(tensors))
        offloader.bring()
    sizes = [host.numel() for host in offloader._hosts]
    assert sum(sizes) == 4 * 135
    assert set(sizes[:-1]) == {64}


def test_what_is_not_kept_comes_back_as_zeros_without_host_memory() -> None:
    offloader, (tensor,) = StorageOffloader(keep=False), build_tensors(5)
    offloader.park(find_storages([tensor]))
    offloader.bring()
    assert torch.equal(tensor, torch.zeros(5))
    assert not offloader._hosts


def test_the_fp8_copies_that_transformer_engine_keeps_of_weights_are_dropped() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    # The name and the place of Transformer Engine's cache (transformer_engine/pytorch/module/base.py).
    model[0]._fp8_workspaces = {"weight": torch.zeros(2, 2, dtype=torch.uint8)}
    drop_fp8_weights([model])
    assert model[0]._fp8_workspaces == {}
