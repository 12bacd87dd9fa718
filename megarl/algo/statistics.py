"""Means and standard deviations, of the population (1/n), over the batch, the groups, or the run so far; generated
tokens of many responses in blocks of rows, their discounted sums, and the refusal of what is not finite.

Suffixes: B samples, T response positions, N blocks, K positions of a block; R tokens of all samples, end to end.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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


class NonFiniteError(ValueError):
    """A tensor holds NaN or infinity where a number is needed."""


def check_finite(name: str, tensor: Tensor, mask: Tensor | None = None, rows: Tensor | None = None) -> None:
    """Raise `NonFiniteError` naming the tensor, how many entries are not finite, and the first of them.

    tensor: float [B], [B, T], or flat [R] with rows int64 [R] giving each entry's row.
    mask: bool, same shape; entries outside it may hold anything. None: every entry counts.
    """
    if bool(torch.isfinite(tensor.sum())):
        return  # What is not finite makes the sum so; where finite numbers overflow it, all are looked at.
    bad = ~torch.isfinite(tensor)
    if mask is not None:
        bad &= mask
    if not bool(bad.any()):
        return
    where = tuple(int(i) for i in bad.nonzero()[0])
    row = where[0] if rows is None else int(rows[where[0]])
    looked_at = int(mask.sum()) if mask is not None else tensor.numel()
    raise NonFiniteError(
        f"{name}: {int(bad.sum())} of {looked_at} entries are not finite, first in row {row} at index "
        f"{list(where)} ({float(tensor[where])}); must be finite numbers"
    )


# float64 is only used within a block, and no time is spent on the padding of shorter responses.

NUM_TOKENS = 1 << 18
"""Of a block: in float64 they are 2 MB. A longer response is a block of its own."""


@dataclass(frozen=True)
class Block:
    """Consecutive rows of a batch."""

    rows: slice
    mask: NDArray[np.bool_]
    """bool [K, T]: the generated tokens"""
    lengths: Tensor
    """int64 [K]: how many each row has"""

    @property
    def num_tokens(self) -> int:
        """R"""
        return int(self.lengths.sum())

    @property
    def token_rows(self) -> Tensor:
        """int64 [R], 0..K-1: the row of each token."""
        return torch.repeat_interleave(self.lengths)

    @property
    def ends(self) -> Tensor:
        """int64 [K]: number of the token after each row's last one."""
        return self.lengths.cumsum(0)

    def flatten(self, x_BT: Tensor) -> Tensor:
        """The generated tokens' entries, row by row, [R] in the dtype of `x_BT`; a copy."""
        return torch.from_numpy(x_BT[self.rows].detach().numpy()[self.mask])

    def spread(self, x_B: Tensor) -> Tensor:
        """Each row's number for each of its tokens, [R]."""
        return torch.repeat_interleave(x_B[self.rows], self.lengths)

    def sum_rows(self, x_R: Tensor) -> Tensor:
        """The sum over each row's tokens, [K]."""
        return torch.zeros(self.lengths.shape, dtype=x_R.dtype).index_add(0, self.token_rows, x_R)

    def put(self, x_R: Tensor, out_BT: Tensor) -> None:
        """Write the generated tokens' entries of `out_BT`; the opposite of `flatten`."""
        out_BT[self.rows].numpy()[self.mask] = x_R.to(out_BT.dtype).numpy()


def allocate_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory page by page as they are written: padding takes none."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(*shape, dtype=dtype)
    pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)


def count_generated(mask_BT: Tensor) -> Tensor:
    """int64 [B]: generated tokens of each row."""
    return torch.from_numpy(np.count_nonzero(mask_BT.numpy(), axis=1).astype(np.int64))


def split_blocks(mask_BT: Tensor) -> Iterator[Block]:
    """All rows, in order. mask_BT: bool [B, T], the generated tokens. Of no rows there is one empty block."""
    mask, lengths = mask_BT.numpy(), count_generated(mask_BT)
    start, num_tokens = 0, 0
    for row, length in enumerate(lengths.tolist()):
        if num_tokens + length > NUM_TOKENS and row > start:
            yield Block(slice(start, row), mask[start:row], lengths[start:row])
            start, num_tokens = row, 0
        num_tokens += length
    yield Block(slice(start, len(lengths)), mask[start:], lengths[start:])


BLOCK = 16
"""K: wide enough that few levels remain, narrow enough that the K x K product costs less than memory traffic."""
_CHUNK = 1 << 17
"""Entries worked on at a time: in float64 they stay in a core's cache."""
_SMALL_CHUNK, _LARGEST_RATIO = 1 << 13, 2
"""Up to the first rows share a chunk whatever their lengths; of a larger one, the longest row to its shortest"""


def compute_discounted_sums(x_BT: Tensor, decay_B: Tensor) -> Tensor:
    """y_t = x_t + decay * y_{t+1}, with y = 0 past the last position; float64 in and out.

    x_BT: float64 [B, T]. decay_B: float64 [B] for a factor per row, or [1] for all rows.
    Within a block y is a product with the triangular matrix decay^(s - t); the blocks' first values obey the same
    recurrence with decay^K, so the function calls itself on a tensor K times shorter.
    """
    num_rows, num_positions = x_BT.shape
    if num_rows == 0 or num_positions == 0:
        return x_BT.clone()
    size = min(BLOCK, num_positions)
    num_blocks = -(-num_positions // size)
    if num_blocks * size != num_positions:
        x_BT = torch.nn.functional.pad(x_BT, (0, num_blocks * size - num_positions))
    offsets_K = torch.arange(size, device=x_BT.device)
    gap_KK = offsets_K[:, None] - offsets_K[None, :]
    weight_BKK = decay_B[:, None, None] ** gap_KK.clamp(min=0) * (gap_KK >= 0)
    x_BNK = x_BT.view(num_rows, num_blocks, size)
    y_BNK = torch.matmul(x_BNK, weight_BKK[0] if decay_B.numel() == 1 else weight_BKK)
    if num_blocks > 1:
        first_BN = compute_discounted_sums(y_BNK[:, 1:, 0].contiguous(), decay_B**size)
        reach_BK = decay_B[:, None] ** (size - offsets_K)
        y_BNK[:, :-1].addcmul_(first_BN[:, :, None], reach_BK[:, None, :])
    return y_BNK.view(num_rows, num_blocks * size)[:, :num_positions]


def sum_discounted(x_R: Tensor, lengths_B: Tensor, decay_B: Tensor) -> Tensor:
    """As `compute_discounted_sums` for rows that stand end to end, float64 [R].

    x_R: float64. lengths_B: int64, at least 0; their sum is R. decay_B: float64 [B], or [1] for all rows. Rows of like
    length are worked on together, so that a short one costs its own length and not the longest one's. Raises
    NonFiniteError where a sum is NaN or infinite.
    """
    lengths, starts = lengths_B.tolist(), (lengths_B.cumsum(0) - lengths_B).tolist()
    x, out_R = x_R.numpy(), torch.zeros_like(x_R)
    out = out_R.numpy()
    for rows, width in _split_by_length(lengths_B):
        spans = [(row, slice(starts[row], starts[row] + lengths[row])) for row in rows.tolist()]
        padded = torch.zeros(len(spans), width, dtype=torch.float64)
        view = padded.numpy()
        for place, (row, span) in enumerate(spans):
            view[place, : lengths[row]] = x[span]
        sums = compute_discounted_sums(padded, decay_B if decay_B.numel() == 1 else decay_B[rows]).numpy()
        for place, (row, span) in enumerate(spans):
            out[span] = sums[place, : lengths[row]]
    check_finite("discounted sums", out_R)
    return out_R


def _split_by_length(lengths_B: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Row numbers (int64) sorted by length, and a width that holds all their tokens, chunk by chunk."""
    # Widths in whole blocks spare the scan its padding.
    widths, rows = ((lengths_B + BLOCK - 1) // BLOCK * BLOCK).sort()
    limits, start = widths.tolist(), 0
    while start < len(limits):
        stop = start + 1
        while stop < len(limits) and _fits(limits[start], limits[stop], stop + 1 - start):
            stop += 1
        if limits[stop - 1] > 0:
            yield rows[start:stop], limits[stop - 1]
        start = stop


def _fits(shortest: int, longest: int, num_rows: int) -> bool:
    area = longest * num_rows
    return area <= _SMALL_CHUNK or (area <= _CHUNK and longest <= _LARGEST_RATIO * shortest)
