"""Numbers that tell how a run goes; none of them enters a gradient.

Suffixes: B samples, T response positions. Everything is over the generated tokens of the global batch, in float64.
"""

import math
import warnings

import torch
from torch import Tensor

from megarl.algo.blocks import count_generated, split_blocks
from megarl.algo.finite import check_finite
from megarl.algo.mismatch import compute_log_ratio, compute_outside
from megarl.algo.statistics import Mean, Summary, compute_group_index, compute_moments
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


class ExplainedVariance:
    """1 - Var(G - V) / Var(G) of tokens that come in pieces; 1 is perfect, 0 no better than a constant."""

    def __init__(self) -> None:
        self.returns, self.errors = Summary(), Summary()

    def add(self, values: Tensor, returns: Tensor) -> None:
        """values (V), returns (G): float64 [R]."""
        self.returns.add(returns)
        self.errors.add(returns - values)

    @property
    def is_defined(self) -> bool:
        """Whether there are returns that differ."""
        return not is_constant(self.returns.low, self.returns.high)

    @property
    def value(self) -> float:
        """0 where all G are equal."""
        return 1.0 - self.errors.variance / self.returns.variance if self.is_defined else 0.0


def compute_explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """`ExplainedVariance` over the mask. values (V), returns (G): float [B, T]. mask: bool [B, T]."""
    check_finite("values", values, mask)
    check_finite("returns", returns, mask)
    explained = ExplainedVariance()
    for block in split_blocks(mask):
        explained.add(block.flatten(values).double(), block.flatten(returns).double())
    return explained.value


def is_constant(low: float, high: float) -> bool:
    """Whether there are no values, or all between these limits are equal but for rounding (1e-6): returns are sums with
    the critic's values in them, so that equal ones differ in their last digits.
    """
    return high - low <= _ROUNDING * (1.0 + max(abs(low), abs(high)))


def compute_quarters(lengths: Tensor) -> Tensor:
    """Which quarter of its response each generated token lies in, int8 [R]: 0 to 3.

    floor(4 n / l) for the token that n of the response's l generated tokens precede. lengths: int64 [K], l of each
    response; R is their sum.
    """
    ends = find_quarter_ends(lengths)
    sizes = ends.diff(dim=1, prepend=torch.zeros(len(lengths), 1, dtype=torch.int64))
    return torch.arange(4, dtype=torch.int8).repeat(len(lengths)).repeat_interleave(sizes.flatten())


def find_quarter_ends(lengths: Tensor) -> Tensor:
    """How many tokens of a response stand before the end of each of its quarters, int64 [K, 4]. lengths: int64 [K]."""
    return (torch.arange(1, 5) * lengths[:, None] + 3) // 4


def compute_batch_metrics(experience: Experience) -> Metrics:
    """reward/* and length/* (generated tokens) of one iteration's raw experience, over the samples of this iteration
    (ages 0) that have a reward; where there are none, reward/failed_frac alone or nothing. Raises NonFiniteError.

    reward/failed_frac: share of the samples of this iteration without a reward. length/truncated_frac: of those with
    one, cut at rollout.response_length, which limits actions and observations together, or environment.turn_length.
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
    lengths = count_generated(experience.mask)[fresh].double()
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
        "length/sum": float(lengths.sum()),
        "length/mean": float(lengths.mean()),
        "length/min": float(lengths.min()),
        "length/max": float(lengths.max()),
        "length/truncated_frac": float(experience.truncated[fresh].double().mean()),
    }


def compute_mismatch_metrics(experience: Experience, config: MismatchConfig) -> Metrics:
    """mismatch/* over the samples of this iteration, where the ratio r = exp(old_logprobs - rollout_logprobs) is that
    of two engines with the same weights (with rollout.max_staleness, of weights up to that many updates apart);
    replay/* over replayed and saved samples, where it is that of two policies.

    mismatch/ratio_mean, ratio_max, outside_frac: r at the configured level (token, sequence, geometric).
    mismatch/kl: k3 estimate of KL(rollout engine, training engine) per token, mean of r - 1 - log r.
    mismatch/logprob_gap_mean, logprob_gap_max: |log r| per token.
    mismatch/kl_at_0_25 .. kl_at_75_100, logprob_gap_at_0_25 ..: the same over the tokens in that quarter of their
    response (`compute_quarters`); worst_quarter: 1 to 4, that of the largest mean gap.
    replay/ratio_mean, ratio_max, kl as above; logprob_above, logprob_below as in `_compute_older_logprobs`. What has no
    token is left out. Raises NonFiniteError.
    """
    mask = experience.mask
    check_finite("old_logprobs", experience.old_logprobs, mask)
    check_finite("rollout_logprobs", experience.rollout_logprobs, mask)
    fresh, replayed = GapSummary("mismatch", config), RatioSummary("replay")
    for block in split_blocks(mask):
        old, rollout = (block.flatten(x).double() for x in (experience.old_logprobs, experience.rollout_logprobs))
        token = (old - rollout).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
        level = compute_log_ratio(token, block.token_rows, block.lengths, config.level)
        is_fresh = block.spread(experience.ages == 0)
        if bool(is_fresh.all()):
            fresh.add_gaps(token, level, compute_quarters(block.lengths))
        else:
            fresh.add_gaps(token[is_fresh], level[is_fresh], compute_quarters(block.lengths)[is_fresh])
            replayed.add(token[~is_fresh], level[~is_fresh])
    older = _compute_older_logprobs(experience) if replayed.count else {}
    return fresh.compute_metrics() | replayed.compute_metrics() | older


def _compute_older_logprobs(experience: Experience) -> Metrics:
    """replay/logprob_above and replay/logprob_below: mean old_logprobs of the tokens of replayed and saved responses
    whose reward is above the mean of these responses' rewards, and of the others; what has no token is left out.
    """
    older, rewards = experience.ages > 0, experience.rewards.double()
    is_above = rewards > rewards[older & ~experience.failed].mean()
    above, below = Mean(), Mean()
    for block in split_blocks(experience.mask):
        logprobs, is_older = block.flatten(experience.old_logprobs).double(), block.spread(older)
        better = block.spread(is_above)
        above.add(logprobs[is_older & better])
        below.add(logprobs[is_older & ~better])
    means = {"replay/logprob_above": above, "replay/logprob_below": below}
    return {name: mean.value for name, mean in means.items() if mean.count}


def compute_replay_metrics(experience: Experience) -> Metrics:
    """replay/frac: share of the samples that are replayed; replay/age_mean: their mean age in iterations. Empty where
    none with a generated token is.
    """
    old_B = experience.ages > 0
    if not bool(experience.mask[old_B].any()):
        return {}
    return {
        "replay/frac": float(old_B.double().mean()),
        "replay/age_mean": float(experience.ages[old_B].double().mean()),
    }


class RatioSummary:
    """Means over tokens that come in pieces: of the ratio and of the KL."""

    def __init__(self, prefix: str):
        self._prefix = prefix
        self._ratio, self._kl, self._largest = Mean(), Mean(), -math.inf

    @property
    def count(self) -> int:
        return self._ratio.count

    def add(self, token_R: Tensor, level_R: Tensor) -> Tensor:
        """The k3 estimate of the KL of each token, float64 [R]."""
        kl = torch.expm1(token_R) - token_R
        if token_R.numel():
            ratio = level_R.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
            self._ratio.add(ratio)
            self._largest = max(self._largest, float(ratio.max()))
            self._kl.add(kl)
        return kl

    def compute_metrics(self) -> Metrics:
        if not self.count:
            return {}
        return {
            f"{self._prefix}/ratio_mean": self._ratio.value,
            f"{self._prefix}/ratio_max": self._largest,
            f"{self._prefix}/kl": self._kl.value,
        }


class GapSummary(RatioSummary):
    """Also of the gap between the log-probs, and by quarters of the responses."""

    def __init__(self, prefix: str, config: MismatchConfig):
        super().__init__(prefix)
        self._config = config
        self._outside, self._gap, self._largest_gap = Mean(), Mean(), -math.inf
        self._quarters = [(Mean(), Mean()) for _ in QUARTERS]

    def add_gaps(self, token_R: Tensor, level_R: Tensor, quarters_R: Tensor) -> None:
        kl, gap = self.add(token_R, level_R), token_R.abs()
        if not token_R.numel():
            return
        self._outside.add(compute_outside(level_R, self._config))
        self._gap.add(gap)
        self._largest_gap = max(self._largest_gap, float(gap.max()))
        for quarter, (gaps, kls) in enumerate(self._quarters):
            here = (quarters_R == quarter).numpy()
            gaps.add(torch.from_numpy(gap.numpy()[here]))
            kls.add(torch.from_numpy(kl.numpy()[here]))

    def compute_metrics(self) -> Metrics:
        if not self.count:
            return {}
        metrics = super().compute_metrics() | {
            "mismatch/outside_frac": self._outside.value,
            "mismatch/logprob_gap_mean": self._gap.value,
            "mismatch/logprob_gap_max": self._largest_gap,
        }
        for name, (gaps, kls) in zip(QUARTERS, self._quarters, strict=True):
            if gaps.count:
                metrics |= {f"mismatch/logprob_gap_at_{name}": gaps.value, f"mismatch/kl_at_{name}": kls.value}
        mean_gaps = [gaps.value if gaps.count else -math.inf for gaps, _ in self._quarters]
        metrics["mismatch/worst_quarter"] = 1.0 + mean_gaps.index(max(mean_gaps))
        return metrics


def measure_engine_noise(experience: Experience) -> float | None:
    """Standard deviation per token of old_logprobs - rollout_logprobs where the same weights gave both.

    None where there are no two such tokens, as when all were sampled ahead.
    """
    gap = Summary()
    for block in split_blocks(experience.scored):
        fresh = block.spread(experience.ages == 0)
        old, rollout = (block.flatten(x).double() for x in (experience.old_logprobs, experience.rollout_logprobs))
        gap.add((old - rollout)[fresh])
    return gap.std if gap.count > 1 else None


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
    mean_engines, mean_taper = Mean(), Mean()
    for block in split_blocks(samples.mask):
        negative = block.flatten(samples.loss_mask) & (block.flatten(samples.advantages) < 0)
        engines = (~block.flatten(scored)).double()
        mean_engines.add(engines[negative])
        if engine_noise is None:
            continue
        scale: Tensor = torch.ones_like(engines)
        if level is not RatioLevel.token:
            engines = engines.new_zeros(block.lengths.shape).index_add(0, block.token_rows, engines)[block.token_rows]
        if level is RatioLevel.geometric:
            scale = block.lengths[block.token_rows]
        engines, scale = engines[negative], scale[negative]
        mean_taper.add(_expect_taper(-(engine_noise**2) / 2 * engines / scale, engine_noise * engines.sqrt() / scale))
    if not mean_engines.count:
        return {}
    metrics = {"topr/engine_mu_frac": mean_engines.value}
    if engine_noise is None:
        return metrics
    metrics["topr/engine_taper"] = mean_taper.value
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
