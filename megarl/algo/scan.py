"""Discounted sums from the end of a sequence, in blocks instead of one position at a time.

Suffixes: B samples, T positions, N blocks, K positions of a block; R tokens of all samples, end to end.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megarl.algo.finite import check_finite

BLOCK = 16
"""K: wide enough that few levels remain, narrow enough that the K x K product costs less than memory traffic."""
_CHUNK = 1 << 17
"""Entries worked on at a time: in float64 they stay in a core's cache."""
_SMALL_CHUNK = 1 << 13
"""Up to here rows share a chunk however different their lengths are."""
_LARGEST_RATIO = 2
"""Of the longest row of a larger chunk to its shortest"""


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
    """Whether rows of these lengths are worked on together."""
    area = longest * num_rows
    return area <= _SMALL_CHUNK or (area <= _CHUNK and longest <= _LARGEST_RATIO * shortest)
