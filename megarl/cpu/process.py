"""What a training process does where there is no GPU; `megarl.mcore.device.Gpu` has the same methods."""

import os
import time
from typing import Any

import torch

from megarl.config.schema.roles import Dtype


class Cpu:
    backend = "gloo"
    """Of torch.distributed, for the training ranks"""
    repeats = True
    """It computes the same from the same, whether or not it is asked to"""
    capability = None
    pins_memory = False

    def device(self) -> torch.device:
        return torch.device("cpu")

    def prepare(self, dtype: Dtype, *, deterministic: bool, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    def take(self, rank: int, uuid: str | None) -> str | None:
        """No GPU."""
        return None

    def synchronize(self) -> None:
        pass

    def give_back(self) -> None:
        pass

    def import_engine(self) -> None:
        """Without CUDA the import hook lets nobody find it."""

    def measure_tflops(self, dtype: torch.dtype) -> float | None:
        """What matrix products take at most, in 1e12 operations a second: the best of a few that fit into the caches,
        on one core, times the number of cores; some milliseconds.

        In seconds of this thread's own, so that a busy machine has the same peak as an idle one.
        """
        size, before = 512, torch.get_num_threads()
        matrix = torch.ones(size, size, dtype=dtype)
        torch.set_num_threads(1)
        seconds = []
        try:
            for _ in range(5):
                start = time.thread_time()
                matrix @ matrix
                seconds.append(time.thread_time() - start)
        finally:
            torch.set_num_threads(before)
        return float(2 * size**3 * len(os.sched_getaffinity(0)) / min(seconds) / 1e12)

    def take_random_state(self) -> dict[str, Any]:
        return {}

    def put_random_state(self, state: dict[str, Any]) -> bool:
        """Whether what Megatron tracks in this state is of this kind of device: a GPU's generator or the CPU's."""
        return "cuda" not in state
