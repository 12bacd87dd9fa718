"""The optimizer steps of an iteration: which samples each learns from, and one value per metric of them all."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.config.schema.root import Config
from megarl.types import Metrics


def split_minibatches(config: Config, num_samples: int, iteration: int) -> list[Tensor]:
    """Row numbers (int64) of each optimizer step: a new order in every epoch, the same for the same seed."""
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + iteration)
    size = config.train.minibatch_size
    return [
        rows
        for _ in range(config.train.epochs_per_iteration)
        for rows in torch.split(torch.randperm(num_samples, generator=generator), size)
    ]


def average_steps(steps: Sequence[Metrics]) -> Metrics:
    """One value per metric: over the optimizer steps the maximum for names ending in _max, the sum for those ending in
    _sum, else the mean.
    """
    values = defaultdict(list)
    for step in steps:
        for name, value in step.items():
            values[name].append(value)
    return {
        name: max(v) if name.endswith("_max") else sum(v) / (1 if name.endswith("_sum") else len(v))
        for name, v in values.items()
    }
