"""The generated tokens of many responses in blocks of rows, discounted sums, and the refusal of what is not finite.

Suffixes: B samples, T positions, N blocks, K positions of a block; R tokens of all samples, end to end.
"""

import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


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
