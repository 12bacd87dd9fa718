"""Numbers that tell how a run goes; none of them enters a gradient.

Suffixes: B samples, T response positions. Everything is over the generated tokens of the global batch, in float64.
"""

import warnings

import torch
from torch import Tensor

from megarl.algo.finite import check_finite
from megarl.algo.mismatch import compute_log_ratio, compute_outside
from megarl.algo.statistics import compute_group_index, compute_moments
from megarl.config.schema.algo import MismatchConfig
from megarl.config.schema.algo_choices import NormScope, RatioLevel
from megarl.types import Experience, Metrics, TrainingSamples

QUARTERS = ("0_25", "25_50", "50_75", "75_100")
"""Parts of a response, in percent of its generated tokens, as they stand at the end of metric names."""

LOWEST_ENGINE_TAPER = 0.9
"""Below this the rollout engine's noise has taken a notable part of TOPR's negative samples."""

_ROUNDING = 1e-6

_LARGEST_LOG_RATIO = 80.0
"""Logged ratios are cut at its exponential: a finite number is logged even when two engines disagree entirely."""


def compute_explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(G - V) / Var(G) over the mask; 1 is perfect, 0 no better than a constant; 0 where all G are equal.

    values (V), returns (G): float [B, T]. mask: bool [B, T].
    """
    check_finite("values", values, mask)
    check_finite("returns", returns, mask)
    v, g = values[mask].double(), returns[mask].double()
    if is_constant(g):
        return 0.0
    return float(1.0 - (g - v).var(correction=0) / g.var(correction=0))


def is_constant(values: Tensor) -> bool:
    """Whether there are no values, or all are equal but for rounding (1e-6): returns are sums with the critic's values
    in them, so that equal ones differ in their last digits.
    """
    if values.numel() == 0:
        return True
    low, high = values.double().aminmax()
    return bool(high - low <= _ROUNDING * (1.0 + torch.maximum(low.abs(), high.abs())))


def compute_quarters(mask: Tensor) -> Tensor:
    """Which quarter of its response each generated token lies in, int64 [B, T]: 0 to 3; -1 outside the mask.

    floor(4 n / l) for the token that n of the response's l generated tokens precede. mask: bool [B, T].
    """
    before = mask.cumsum(1) - 1
    return torch.where(mask, 4 * before // mask.sum(1, keepdim=True).clamp(min=1), -1)


def compute_batch_metrics(experience: Experience) -> Metrics:
    """reward/* and length/* (generated tokens) of one iteration's raw experience, over the samples of this iteration
    (ages 0) that have a reward; where there are none, reward/failed_frac alone or nothing. Raises NonFiniteError.

    reward/failed_frac: share of the samples of this iteration without a reward. length/truncated_frac: of those with
    one, cut at rollout.response_length, which limits actions and observations together.
    """
    fresh = experience.ages == 0
    if not bool(fresh.any()):
        return {}
    failed_frac = {"reward/failed_frac": float(experience.failed[fresh].double().mean())}
    fresh &= ~experience.failed
    check_finite("rewards", experience.rewards, ~experience.failed)
    rewards, groups = experience.rewards[fresh].double(), experience.groups[fresh]
    if rewards.numel() == 0:
        return failed_frac
    lengths = experience.mask[fresh].sum(1).double()
    index, sizes = compute_group_index(groups)
    constant = compute_moments(rewards, groups, NormScope.group).constant
    equal_groups = torch.zeros(sizes.shape, dtype=torch.bool).index_put((index,), constant)
    return {
        **failed_frac,
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "reward/equal_groups_frac": float(equal_groups.double().mean()),
        "length/mean": float(lengths.mean()),
        "length/min": float(lengths.min()),
        "length/max": float(lengths.max()),
        "length/truncated_frac": float(experience.truncated[fresh].double().mean()),
    }


def compute_mismatch_metrics(experience: Experience, config: MismatchConfig) -> Metrics:
    """mismatch/* over the samples of this iteration, where the ratio r = exp(old_logprobs - rollout_logprobs) is that
    of two engines with the same weights (with rollout.max_staleness, of weights up to that many updates apart);
    replay/* over replayed samples, where it is that of two policies.

    mismatch/ratio_mean, ratio_max, outside_frac: r at the configured level (token, sequence, geometric).
    mismatch/kl: k3 estimate of KL(rollout engine, training engine) per token, mean of r - 1 - log r.
    mismatch/logprob_gap_mean, logprob_gap_max: |log r| per token.
    mismatch/kl_at_0_25 .. kl_at_75_100, logprob_gap_at_0_25 ..: the same over the tokens in that quarter of their
    response (`compute_quarters`); worst_quarter: 1 to 4, that of the largest mean gap.
    replay/frac: share of the samples that are replayed; replay/age_mean: their mean age in iterations;
    replay/ratio_mean, ratio_max, kl as above. What has no token is left out. Raises NonFiniteError.
    """
    mask = experience.mask
    check_finite("old_logprobs", experience.old_logprobs, mask)
    check_finite("rollout_logprobs", experience.rollout_logprobs, mask)
    rows = mask.nonzero()[:, 0]
    token = (experience.old_logprobs[mask].double() - experience.rollout_logprobs[mask].double()).clamp(
        -_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO
    )
    level = compute_log_ratio(token, rows, mask.sum(1), config.level)
    fresh = (experience.ages == 0)[rows]
    metrics: Metrics = {}
    if bool(fresh.any()):
        quarters = compute_quarters(mask)[mask][fresh]
        metrics |= _describe_ratio("mismatch", token[fresh], level[fresh])
        metrics |= _describe_gap(token[fresh], level[fresh], quarters, config)
    if not bool(fresh.all()):
        old = experience.ages > 0
        metrics |= _describe_ratio("replay", token[~fresh], level[~fresh])
        metrics["replay/frac"] = float(old.double().mean())
        metrics["replay/age_mean"] = float(experience.ages[old].double().mean())
    return metrics


def _describe_ratio(prefix: str, token_R: Tensor, level_R: Tensor) -> Metrics:
    ratio = level_R.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    return {
        f"{prefix}/ratio_mean": float(ratio.mean()),
        f"{prefix}/ratio_max": float(ratio.max()),
        f"{prefix}/kl": float((torch.expm1(token_R) - token_R).mean()),
    }


def _describe_gap(token_R: Tensor, level_R: Tensor, quarters_R: Tensor, config: MismatchConfig) -> Metrics:
    gap = token_R.abs()
    metrics = {
        "mismatch/outside_frac": float(compute_outside(level_R, config).double().mean()),
        "mismatch/logprob_gap_mean": float(gap.mean()),
        "mismatch/logprob_gap_max": float(gap.max()),
    }
    mean_gaps: dict[int, float] = {}
    for quarter, name in enumerate(QUARTERS):
        here = quarters_R == quarter
        if bool(here.any()):
            mean_gaps[quarter] = metrics[f"mismatch/logprob_gap_at_{name}"] = float(gap[here].mean())
            metrics[f"mismatch/kl_at_{name}"] = float((torch.expm1(token_R[here]) - token_R[here]).mean())
    metrics["mismatch/worst_quarter"] = 1.0 + max(mean_gaps, key=lambda quarter: mean_gaps[quarter])
    return metrics


def measure_engine_noise(experience: Experience) -> float | None:
    """Standard deviation per token of old_logprobs - rollout_logprobs where the same weights gave both.

    None where there are no two such tokens, as when all were sampled ahead.
    """
    same = experience.scored & (experience.ages == 0)[:, None]
    gap = experience.old_logprobs[same].double() - experience.rollout_logprobs[same].double()
    return float(gap.std(correction=0)) if gap.numel() > 1 else None


def compute_engine_taper(
    samples: TrainingSamples, scored: Tensor, level: RatioLevel, engine_noise: float | None
) -> Metrics:
    """What of TOPR's taper is the rollout engine's noise. Empty where no advantage is negative; warns where it is much.

    topr/engine_mu_frac: share of the tokens of negative advantage whose log mu is the rollout engine's (`scored`, bool
    [B, T], is False). topr/engine_taper: the mean taper that the engine's noise alone would leave these tokens.

    With log pi - log mu normal, of variance noise^2 and mean -noise^2 / 2 per token of the engine (so that the mean of
    pi / mu is 1), the taper of n such tokens is 2 Phi(-noise sqrt(n) / 2) for the product. engine_noise: as
    `measure_engine_noise` gives it; with None there is no topr/engine_taper.
    """
    negative = samples.loss_mask & (samples.advantages < 0)
    if not bool(negative.any()):
        return {}
    engines = (samples.mask & ~scored).double()
    metrics = {"topr/engine_mu_frac": float(engines[negative].mean())}
    if engine_noise is None:
        return metrics
    if level is not RatioLevel.token:
        engines = engines.sum(1, keepdim=True).expand_as(engines)
    scale = samples.mask.sum(1, keepdim=True).clamp(min=1) if level is RatioLevel.geometric else 1
    taper = _expect_taper(-(engine_noise**2) / 2 * engines / scale, engine_noise * engines.sqrt() / scale)
    metrics["topr/engine_taper"] = float(taper[negative].mean())
    if metrics["topr/engine_taper"] < LOWEST_ENGINE_TAPER:
        warnings.warn(
            "TOPR: the rollout engine's noise alone leaves the negative responses a weight below"
            f" {LOWEST_ENGINE_TAPER:g} (topr/engine_taper), since their log-probs of the weights that sampled them are"
            f" the engine's (topr/engine_mu_frac) and algo.topr.ratio_level={level.name}: they are hardly unlearned."
            " algo.topr.ratio_level=geometric bears the noise; with rollout.max_staleness=0 the trainer's own log-probs"
            " are taken",
            RuntimeWarning,
            stacklevel=3,
        )
    return metrics


def _expect_taper(mean: Tensor, deviation: Tensor) -> Tensor:
    """E[min(exp(x), 1)] of a normal x, float64; 1 where its deviation is 0."""
    s = deviation.clamp(min=1e-12)
    below = (mean + s**2 / 2).exp() * torch.special.ndtr(-(mean + s**2) / s)
    return torch.where(deviation > 0, below + torch.special.ndtr(mean / s), 1.0)
