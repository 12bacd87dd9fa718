"""Means and standard deviations, of the population (1/n), over the batch, the groups, or the run so far.

Suffixes: B samples, T response positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algo.blocks import Block, split_blocks
from megarl.config.schema.algo import NormScope

STD_EPS = 1e-6
"""Added to every standard deviation that divides."""


@dataclass(frozen=True)
class Moments:
    """Moments of the set that each sample belongs to."""

    mean: Tensor
    """float64 [B]"""
    std: Tensor
    """float64 [B]"""
    constant: Tensor
    """bool [B]: all members of the set are equal"""


@dataclass(frozen=True)
class RunningMoments:
    """Moments of every reward of the run so far; plain numbers, so that a checkpoint can hold them."""

    count: int = 0
    mean: float = 0.0
    sum_of_squares: float = 0.0
    """of the differences from the mean"""

    @property
    def std(self) -> float:
        return (self.sum_of_squares / self.count) ** 0.5 if self.count else 0.0


def merge_moments(moments: RunningMoments, values_B: Tensor) -> RunningMoments:
    """The moments with more values (float [B]) taken in (Chan et al.'s parallel variance)."""
    if values_B.numel() == 0:
        return moments
    values = values_B.double()
    count, mean = values.numel(), float(values.mean())
    total, shift = moments.count + count, mean - moments.mean
    spread = float(((values - mean) ** 2).sum())
    return RunningMoments(
        total,
        moments.mean + shift * count / total,
        moments.sum_of_squares + spread + shift**2 * moments.count * count / total,
    )


def compute_group_index(groups_B: Tensor) -> tuple[Tensor, Tensor]:
    """Each sample's group as 0..G-1 (int64 [B]), and the groups' sizes (int64 [G])."""
    _, index, sizes = torch.unique(groups_B, return_inverse=True, return_counts=True)
    return index, sizes


def compute_moments(
    values_B: Tensor, groups_B: Tensor, scope: NormScope, running: RunningMoments | None = None
) -> Moments:
    """Mean and std, for each sample, of the set that `scope` names.

    values_B: float [B]. groups_B: int64 [B]. running: needed for scope=running, with these values taken in already.
    """
    values = values_B.double()
    if scope is NormScope.running:
        if running is None:
            raise ValueError("reward_norm: running found without moments of the run so far; pass reward_moments")
        mean, std = torch.full_like(values, running.mean), torch.full_like(values, running.std)
        # The merged sums carry rounding, so equality is judged with its size in mind.
        return Moments(mean, std, std <= 1e-12 * (1.0 + mean.abs()))
    if scope is NormScope.group:
        index, sizes = compute_group_index(groups_B)
    else:
        index = torch.zeros(values.shape, dtype=torch.int64, device=values.device)
        sizes = torch.tensor([values.numel()], device=values.device)
    empty = torch.zeros(sizes.shape, dtype=torch.float64, device=values.device)
    mean = (empty.index_add(0, index, values) / sizes)[index]
    variance = empty.index_add(0, index, (values - mean) ** 2) / sizes
    high = empty.scatter_reduce(0, index, values, "amax", include_self=False)
    low = empty.scatter_reduce(0, index, values, "amin", include_self=False)
    return Moments(mean, variance.sqrt()[index], (high == low)[index])


class Summary:
    """Count, mean, variance and limits of numbers that come in pieces.

    Of one piece they are torch's, bit by bit; pieces are merged by Chan et al.'s parallel variance, in float64.
    """

    def __init__(self) -> None:
        self.count, self.mean, self.variance = 0, 0.0, 0.0
        self.low, self.high = math.inf, -math.inf

    def add(self, values: Tensor) -> None:
        """values: float64, of any shape."""
        num = values.numel()
        if num == 0:
            return
        mean, variance = float(values.mean()), float(values.var(correction=0))
        if self.count:
            total, shift = self.count + num, mean - self.mean
            spread = self.count * self.variance + num * variance + shift**2 * self.count * num / total
            mean, variance = self.mean + shift * num / total, spread / total
        low, high = values.aminmax()
        self.count, self.mean, self.variance = self.count + num, mean, variance
        self.low, self.high = min(self.low, float(low)), max(self.high, float(high))

    @property
    def std(self) -> float:
        return math.sqrt(self.variance)


class Mean:
    """As `Summary`, of the mean alone."""

    def __init__(self) -> None:
        self.count, self.value = 0, 0.0

    def add(self, values: Tensor) -> None:
        """values: float64 or bool, of any shape."""
        num = values.numel()
        if num:
            mean = float(values.double().mean())
            total = self.count + num
            self.value = self.value + (mean - self.value) * num / total if self.count else mean
            self.count = total


@dataclass(frozen=True)
class Whitening:
    """(A - mean) / (std + 1e-6), or 0 where all A are equal."""

    mean: float
    std: float
    constant: bool

    @classmethod
    def measure(cls, find: Callable[[Block], Tensor], mask_BT: Tensor) -> Whitening:
        """Over all generated tokens. find: gives those of a block, float64 [R]. mask_BT: bool [B, T]."""
        # One number after the other, whatever the blocks are.
        total, squares = (torch.zeros(1, dtype=torch.float64) for _ in range(2))
        limits = Summary()
        for block in split_blocks(mask_BT):
            values = find(block)
            limits.add(values)
            total.index_add_(0, torch.zeros_like(values, dtype=torch.int64), values)
        if not limits.count:
            return cls(0.0, 0.0, True)
        mean = float(total) / limits.count
        for block in split_blocks(mask_BT):
            values = (find(block) - mean) ** 2
            squares.index_add_(0, torch.zeros_like(values, dtype=torch.int64), values)
        return cls(mean, math.sqrt(float(squares) / limits.count), limits.low == limits.high)

    def apply(self, values: Tensor) -> Tensor:
        """values: float64, of any shape."""
        return torch.zeros_like(values) if self.constant else (values - self.mean) / (self.std + STD_EPS)
