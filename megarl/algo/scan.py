"""Discounted sums from the end of a sequence, in blocks instead of one position at a time.

Suffixes: B samples, T positions, N blocks, K positions of a block.
"""

import torch
from torch import Tensor

BLOCK = 16
"""K: wide enough that few levels remain, narrow enough that the K x K product costs less than memory
traffic.
"""


def compute_discounted_sums(x_BT: Tensor, decay_B: Tensor) -> Tensor:
    """y_t = x_t + decay * y_{t+1}, with y = 0 past the last position; float64 in and out.

    x_BT: float64 [B, T]. decay_B: float64 [B] for a factor per row, or [1] for all rows.
    Within a block y is a product with the triangular matrix decay^(s - t); the blocks' first values obey the
    same recurrence with decay^K, so the function calls itself on a tensor K times shorter.
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
