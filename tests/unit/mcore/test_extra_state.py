"""What Transformer Engine calls the extra state of a module, a pickle, is neither saved nor read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megarl.files import CheckpointError
from megarl.mcore.state import _put_weights, shard_weights


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
