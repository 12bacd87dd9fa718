"""What a training process does where there is no GPU; `megarl.mcore.device.Gpu` has the same methods."""

from typing import Any

import torch

from megarl.config.schema.roles import Dtype


class Cpu:
    backend = "gloo"
    """Of torch.distributed, for the training ranks"""
    repeats = True
    """It computes the same from the same, whether or not it is asked to"""
    capability = None

    def device(self) -> torch.device:
        return torch.device("cpu")

    def prepare(self, dtype: Dtype, *, deterministic: bool, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    def take(self, rank: int, uuid: str | None) -> str | None:
        """No GPU."""
        return None

    def take_random_state(self) -> dict[str, Any]:
        return {}

    def put_random_state(self, state: dict[str, Any]) -> bool:
        """Whether what Megatron tracks in this state is of this kind of device: a GPU's generator or the CPU's."""
        return "cuda" not in state
