"""The peak of tensor memory by phase, on a CPU."""

import torch

from megarl.tools.gpu.measured import measuring_peaks

MB = 10**6


def allocate(megabytes: int) -> torch.Tensor:
    return torch.zeros(megabytes * MB, dtype=torch.uint8)


def test_each_phase_has_the_most_that_was_held_in_it_and_what_earlier_phases_left() -> None:
    outside = allocate(50)
    with measuring_peaks() as meter:
        with meter.phase("first"):
            kept = allocate(10)
            passing = allocate(30)
            del passing
        with meter.phase("idle"):
            pass
        with meter.phase("last"):
            more = allocate(5)
    assert meter.peaks == {"first": 40 * MB, "idle": 10 * MB, "last": 15 * MB}
    assert len(outside) + len(kept) + len(more) == 65 * MB
