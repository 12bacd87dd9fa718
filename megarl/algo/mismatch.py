"""Training engine against rollout engine: the same weights score the same tokens differently.

Ratio exp(old_logprobs - rollout_logprobs) as a weight of the policy loss, per token, per sequence, or as the geometric
mean over a sequence: truncated from above (TIS, https://fengyao.notion.site/off-policy-rl) or 0 outside its bounds
(masked: MIS, IcePop 2510.18855).

Suffix: R flat response tokens of one micro-batch or batch; `rows` (int64 [R]) gives each one's sample.
"""

import math

import torch
from torch import Tensor

from megarl.config.schema.algo import MismatchConfig
from megarl.config.schema.algo_choices import MismatchCorrection, RatioLevel


def compute_log_ratio(log_ratio_R: Tensor, rows: Tensor, row_lengths: Tensor, level: RatioLevel) -> Tensor:
    """Log of the ratio of two policies at the given level, for each token, float [R].

    log_ratio_R: the difference of the tokens' log-probs, 0 where not generated. row_lengths: int64, generated tokens
    per row.
    """
    if level is RatioLevel.token:
        return log_ratio_R
    zeros = torch.zeros(row_lengths.shape, dtype=log_ratio_R.dtype, device=log_ratio_R.device)
    total = zeros.index_add(0, rows, log_ratio_R)
    if level is RatioLevel.geometric:
        total = total / row_lengths.clamp(min=1)
    return total[rows]


def compute_outside(log_ratio_R: Tensor, config: MismatchConfig) -> Tensor:
    """bool [R]: the ratio is outside [low, high]."""
    low = math.log(config.low) if config.low > 0 else -math.inf
    return (log_ratio_R < low) | (log_ratio_R > math.log(config.high))


def compute_mismatch_weight(log_ratio_R: Tensor, config: MismatchConfig) -> Tensor:
    """c: min(ratio, high), or the ratio inside [low, high] and 0 outside, float [R]. No gradient flows through it.

    tis has no lower bound: what the training engine holds for unlikely stays unlikely.
    """
    # Clamped in log space: the exponential of a long sequence's ratio overflows.
    truncated = log_ratio_R.detach().clamp(max=math.log(config.high)).exp()
    if config.correction is MismatchCorrection.tis:
        return truncated
    return torch.where(compute_outside(log_ratio_R, config), 0.0, truncated)
