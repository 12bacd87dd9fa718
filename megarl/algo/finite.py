"""Refusal of numbers that are not finite."""

import torch
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
