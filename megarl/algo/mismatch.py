"""Training engine against rollout engine: the same weights score the same tokens differently.

Ratio exp(old_logprobs - rollout_logprobs) as a weight of the policy loss: clipped (truncated importance sampling) or
rejected outside its bounds (IcePop), per token, per sequence, or as the geometric mean over a sequence.

Suffix: R flat response tokens of one micro-batch or batch; `rows` (int64 [R]) gives each one's sample.
"""

import math

import torch
from torch import Tensor

from megarl.config.schema.algo import MismatchConfig
from megarl.config.schema.algo_choices import MismatchCorrection, MismatchLevel


def compute_log_mismatch(log_ratio_R: Tensor, rows: Tensor, row_lengths: Tensor, level: MismatchLevel) -> Tensor:
    """Log of the ratio at the given level, for each token, float [R].

    log_ratio_R: old_logprobs - rollout_logprobs, 0 where not generated. row_lengths: int64, generated tokens per row.
    """
    if level is MismatchLevel.token:
        return log_ratio_R
    zeros = torch.zeros(row_lengths.shape, dtype=log_ratio_R.dtype, device=log_ratio_R.device)
    total = zeros.index_add(0, rows, log_ratio_R)
    if level is MismatchLevel.geometric:
        total = total / row_lengths.clamp(min=1)
    return total[rows]


def compute_outside(log_ratio_R: Tensor, config: MismatchConfig) -> Tensor:
    """bool [R]: the ratio is outside [low, high]."""
    low = math.log(config.low) if config.low > 0 else -math.inf
    return (log_ratio_R < low) | (log_ratio_R > math.log(config.high))


def compute_mismatch_weight(log_ratio_R: Tensor, config: MismatchConfig) -> Tensor:
    """c: the clipped ratio, or the ratio inside the bounds and 0 outside, float [R]. No gradient flows through it."""
    # Clamped in log space first: the exponential of a long sequence's ratio overflows.
    bounded = log_ratio_R.detach().clamp(max=math.log(config.high)).exp().clamp(min=config.low)
    if config.correction is MismatchCorrection.clip:
        return bounded
    return torch.where(compute_outside(log_ratio_R, config), 0.0, bounded)
