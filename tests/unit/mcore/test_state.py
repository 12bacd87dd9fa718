"""What a checkpoint holds of a model and its random states, and storages in host memory and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megarl.mcore  # noqa: F401
from megarl.files import CheckpointError
from megarl.mcore import optimizer as offload
from megarl.mcore.optimizer import StorageOffloader, drop_fp8_weights, find_storages
from megarl.mcore.state import _put_random_state, _put_weights, _take_random_state, shard_weights


class Linear(nn.Module):
    """As Transformer Engine's: it refuses any extra state that is a pickle."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def get_extra_state(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(b"a pickle"), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        raise RuntimeError("Refusing to load pickled Transformer Engine extra state")


class Experts(Linear):
    """As Megatron's TEGroupedLinear with FP8 products of a recipe that has no state."""

    num_gemms = 3

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def _split_extra_state(self, state: torch.Tensor) -> list[Any]:
        raise TypeError("'NoneType' object is not subscriptable")


class Chunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.experts = Linear(), Experts()

    def sharded_state_dict(self, metadata: Any = None) -> dict[str, Any]:
        state = dict(self.state_dict(keep_vars=True))
        split = self.experts._split_extra_state(state.pop("experts._extra_state"))
        return state | {f"experts._extra_state{number or ''}": each for number, each in enumerate(split)}


def test_a_checkpoint_has_no_state_of_fp8_products_and_none_is_read_from_one() -> None:
    chunk = Chunk()
    sharded = shard_weights(chunk, metadata={})
    assert sorted(sharded) == ["experts.weight", "linear.weight"]
    _put_weights(Path("c"), [chunk], {"0": {key: torch.ones(2) for key in sharded}})
    assert chunk.linear.weight.tolist() == [1, 1]


def test_weights_that_a_checkpoint_lacks_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"c: does not hold what the model has: experts\.weight"):
        _put_weights(Path("c"), [Chunk()], {"0": {"linear.weight": torch.ones(2)}})


def test_on_a_cpu_the_states_of_a_gpus_generator_are_left_out() -> None:
    from megatron.core import tensor_parallel

    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("model-parallel-rng", 3)
    own = _take_random_state()
    # A GPU's state is a seed and an offset.
    foreign = torch.zeros(16, dtype=torch.uint8)
    other = {"torch": own["torch"], "tracker": dict.fromkeys(own["tracker"], foreign), "cuda": foreign}
    kind = other if not torch.cuda.is_available() else {key: other[key] for key in ("torch", "tracker")}
    _put_random_state(kind)
    found = tracker.get_states()
    assert all(torch.equal(found[name], state) for name, state in own["tracker"].items())
    with tracker.fork():
        torch.rand(1)


@pytest.mark.parametrize("sizes", [(7,), (16, 16, 16), (100, 3, 64), (1, 0, 2000)])
def test_storages_come_back_bit_by_bit_whatever_the_pieces(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "PIECE_BYTES", 64)
    offloader = StorageOffloader()
    for extra in (0, 5, 0):
        tensors = [torch.randn(size) for size in [*sizes, *[9] * extra]]
        expected = [tensor.clone() for tensor in tensors]
        offloader.park(find_storages(tensors))
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        offloader.bring()
        assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, expected, strict=True))
    # torch rounds pinned memory up to powers of two: 70 GiB in one piece would be 128.
    hosts = [host.numel() for host in offloader._hosts]
    assert sum(hosts) == 4 * (sum(sizes) + 45)
    assert max(hosts) <= 64


def test_what_is_not_kept_comes_back_as_zeros_without_host_memory() -> None:
    offloader, tensor = StorageOffloader(keep=False), torch.randn(5)
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
