"""Numbers that tell how a run goes; none of them enters a gradient.

Suffixes: B samples, T response positions. Everything is over the generated tokens of the global batch, in
float64.
"""

import torch
from torch import Tensor

from megarl.algo.finite import check_finite
from megarl.algo.mismatch import compute_log_mismatch, compute_outside
from megarl.algo.statistics import compute_group_index, compute_moments
from megarl.config.algo import MismatchConfig
from megarl.config.algo_choices import NormScope
from megarl.types import Experience, Metrics

_LARGEST_LOG_RATIO = 80.0
"""Logged ratios are cut at its exponential: a finite number is logged even when two engines disagree
entirely.
"""


def compute_explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(G - V) / Var(G) over the mask; 1 is perfect, 0 no better than a constant; 0 where Var(G) is 0.

    values (V), returns (G): float [B, T]. mask: bool [B, T].
    """
    check_finite("values", values, mask)
    check_finite("returns", returns, mask)
    v, g = values[mask].double(), returns[mask].double()
    if g.numel() == 0 or bool(g.max() == g.min()):
        return 0.0
    return float(1.0 - (g - v).var(correction=0) / g.var(correction=0))


def compute_batch_metrics(experience: Experience) -> Metrics:
    """reward/* and length/* of one iteration's raw experience."""
    check_finite("rewards", experience.rewards)
    rewards = experience.rewards.double()
    if rewards.numel() == 0:
        return {}
    lengths = experience.mask.sum(1).double()
    index, sizes = compute_group_index(experience.groups)
    constant = compute_moments(rewards, experience.groups, NormScope.group).constant
    equal_groups = torch.zeros(sizes.shape, dtype=torch.bool).index_put((index,), constant)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "reward/equal_groups_frac": float(equal_groups.double().mean()),
        "length/mean": float(lengths.mean()),
        "length/min": float(lengths.min()),
        "length/max": float(lengths.max()),
        "length/truncated_frac": float(experience.truncated.double().mean()),
    }


def compute_mismatch_metrics(experience: Experience, config: MismatchConfig) -> Metrics:
    """mismatch/*: the ratio r = exp(old_logprobs - rollout_logprobs) at the configured level.

    mismatch/kl is the k3 estimate of KL(rollout engine, training engine) per token: mean of r - 1 - log r.
    """
    mask = experience.mask
    check_finite("old_logprobs", experience.old_logprobs, mask)
    check_finite("rollout_logprobs", experience.rollout_logprobs, mask)
    rows = mask.nonzero()[:, 0]
    if rows.numel() == 0:
        return {}
    token = (experience.old_logprobs[mask].double() - experience.rollout_logprobs[mask].double()).clamp(
        -_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO
    )
    level = compute_log_mismatch(token, rows, mask.sum(1), config.level)
    ratio = level.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    return {
        "mismatch/ratio_mean": float(ratio.mean()),
        "mismatch/ratio_max": float(ratio.max()),
        "mismatch/outside_frac": float(compute_outside(level, config).double().mean()),
        "mismatch/kl": float((torch.expm1(token) - token).mean()),
        "mismatch/logprob_gap_mean": float(token.abs().mean()),
        "mismatch/logprob_gap_max": float(token.abs().max()),
    }
