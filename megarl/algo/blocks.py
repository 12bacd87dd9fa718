"""The generated tokens of a batch, a block of rows at a time: float64 is only used within a block, and no time is spent
on the padding of shorter responses.

Suffixes: B samples, T response positions, K rows of a block, R its generated tokens.
"""

import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
