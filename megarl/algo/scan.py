"""Discounted sums from the end of a sequence, in blocks instead of one position at a time.

Suffixes: B samples, T positions, N blocks, K positions of a block.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megarl.algo.finite import check_finite

BLOCK = 16
"""K: wide enough that few levels remain, narrow enough that the K x K product costs less than memory traffic."""
_CHUNK = 1 << 17
"""Entries worked on at a time: in float64 they stay in a core's cache."""


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


def scan_generated(
    combine: Callable[..., Tensor],
    tensors: tuple[Tensor, ...],
    mask_BT: Tensor,
    gamma: float,
    lambda_: float | Tensor,
) -> Tensor:
    """Discounted sums of combine(*tensors), as if each row held its generated tokens only; 0 where not generated.

    tensors: float [B, T], the last of which gives the dtype of the result. mask_BT: bool [B, T]. combine: is given
    float64 pieces of the tensors, the generated tokens of each row moved together. lambda_: a number, or float [B].
    Rows of like extent are worked on together, so that a short response costs its own length and not the batch's.
    Raises NonFiniteError for NaN or infinity inside the mask.
    """
    out_BT = torch.zeros_like(tensors[-1])
    decay_B = gamma * torch.as_tensor(lambda_, dtype=torch.float64, device=mask_BT.device).reshape(-1)
    for rows, width in _split_by_extent(mask_BT):
        mask = mask_BT[:, :width].index_select(0, rows)
        order = _compaction_order(mask)
        pieces = [t[:, :width].index_select(0, rows).where(mask, 0.0).double() for t in tensors]
        if order is not None:
            pieces = [piece.gather(1, order) for piece in pieces]
        sums = compute_discounted_sums(combine(*pieces), decay_B if decay_B.numel() == 1 else decay_B[rows])
        if not torch.isfinite(sums.sum()):
            for name, tensor in zip(("rewards", "values"), tensors, strict=False):
                check_finite(name, tensor, mask_BT)
            check_finite("discounted sums", sums)
        if order is not None:
            sums = torch.empty_like(sums).scatter_(1, order, sums)
        out_BT[:, :width].index_copy_(0, rows, sums.to(out_BT.dtype))
    return out_BT


def _split_by_extent(mask_BT: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Row numbers (int64) sorted by extent, and a width that holds all their generated tokens, chunk by chunk."""
    num_rows, num_positions = mask_BT.shape
    # Eight flags are read as one int64, several times faster than a sum over booleans. That asks for strides and a
    # storage offset in whole words, which a view has not always, so the flags are copied.
    padded = mask_BT.new_zeros(num_rows, num_positions // 8 * 8 + 8)
    padded[:, :num_positions] = mask_BT
    words = padded.view(torch.int64) != 0
    ends_B = (words * torch.arange(1, words.shape[1] + 1, dtype=torch.int32, device=mask_BT.device)).amax(1)
    # Widths in whole blocks spare the scan its padding.
    extents, rows = ((8 * ends_B + BLOCK - 1) // BLOCK * BLOCK).clamp(max=num_positions).sort()
    limits, start = extents.tolist(), 0
    while start < len(limits):
        stop = start + 1
        while stop < len(limits) and limits[stop] * (stop + 1 - start) <= _CHUNK:
            stop += 1
        if limits[stop - 1] > 0:
            yield rows[start:stop], limits[stop - 1]
        start = stop


def _compaction_order(mask: Tensor) -> Tensor | None:
    """int64 [B, T] putting the generated positions first, in order; None where they are first already."""
    if not bool((mask[:, 1:] > mask[:, :-1]).any()):
        return None
    return torch.argsort(~mask, dim=1, stable=True)
