"""Numbers that tell how a run goes; none of them enters a gradient.

Suffixes: B samples, T response positions. Everything is over the generated tokens of the global batch, in float64.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.algo import statistics
from megarl.algo.losses import compute_log_ratio, compute_outside
from megarl.config.schema.algo import MismatchConfig, NormScope
from megarl.types import Experience, Metrics

QUARTERS = ("0_25", "25_50", "50_75", "75_100")
"""Parts of a response, in percent of its generated tokens, as they stand at the end of metric names."""

_ROUNDING = 1e-6

_LARGEST_LOG_RATIO = 80.0
"""Logged ratios are cut at its exponential: a finite number is logged even when two engines disagree entirely."""


class ExplainedVariance:
    """1 - Var(G - V) / Var(G) of tokens that come in pieces; 1 is perfect, 0 no better than a constant."""

    def __init__(self) -> None:
        self.returns, self.errors = statistics.Summary(), statistics.Summary()

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
    statistics.check_finite("values", values, mask)
    statistics.check_finite("returns", returns, mask)
    explained = ExplainedVariance()
    for block in statistics.split_blocks(mask):
        explained.add(block.flatten(values).double(), block.flatten(returns).double())
    return explained.value


def is_constant(low: float, high: float) -> bool:
    """Whether there are no values, or all between these limits are equal but for rounding (1e-6): returns are sums with
    the critic's values in them, so that equal ones differ in their last digits.
    """
    return high - low <= _ROUNDING * (1.0 + max(abs(low), abs(high)))


def compute_quarters(lengths: Tensor) -> Tensor:
    """Which quarter of its response each generated token lies in, int8 [R]: floor(4 n / l) for the token that n of the
    response's l generated tokens precede. lengths: int64 [K], l of each response; R is their sum.
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
    statistics.check_finite("rewards", experience.rewards, ~experience.failed)
    rewards, groups = experience.rewards[fresh].double(), experience.groups[fresh]
    if rewards.numel() == 0:
        return failed_frac
    lengths = statistics.count_generated(experience.mask)[fresh].double()
    index, sizes = statistics.compute_group_index(groups)
    constant = statistics.compute_moments(rewards, groups, NormScope.group).constant
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
    response (`compute_quarters`).
    replay/ratio_mean, ratio_max, kl as above; logprob_above, logprob_below as in `_compute_older_logprobs`. What has no
    token is left out. Raises NonFiniteError.
    """
    mask = experience.mask
    statistics.check_finite("old_logprobs", experience.old_logprobs, mask)
    statistics.check_finite("rollout_logprobs", experience.rollout_logprobs, mask)
    fresh, replayed = GapSummary(config), RatioSummary("replay")
    for block in statistics.split_blocks(mask):
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
    above, below = statistics.Mean(), statistics.Mean()
    for block in statistics.split_blocks(experience.mask):
        logprobs, is_older = block.flatten(experience.old_logprobs).double(), block.spread(older)
        better = block.spread(is_above)
        above.add(logprobs[is_older & better])
        below.add(logprobs[is_older & ~better])
    means = {"replay/logprob_above": above, "replay/logprob_below": below}
    return {name: mean.value for name, mean in means.items() if mean.count}


def compute_replay_metrics(experience: Experience) -> Metrics:
    """replay/frac: share of the samples that are replayed; replay/age_mean: their mean age in iterations."""
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
        self._ratio, self._kl, self._largest = statistics.Mean(), statistics.Mean(), -math.inf

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
    """mismatch/*: also of the gap between the log-probs, and by quarters of the responses."""

    def __init__(self, config: MismatchConfig):
        super().__init__("mismatch")
        self._config = config
        self._outside, self._gap, self._largest_gap = statistics.Mean(), statistics.Mean(), -math.inf
        self._quarters = [(statistics.Mean(), statistics.Mean()) for _ in QUARTERS]

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
        return metrics


# How much of an advantage is about its token, and how the critic stands to the mean of the group or of the batch.
#
# The signal of token t is its true advantage, A* = Q(s_t, a_t) - V*(s_t); the rest of an advantage is noise: what other
# tokens did. Where the next state is known once the token is, r_t + gamma V*(s_t+1) is Q, and with M_t = G_t - V*(s_t),
# G_t the discounted sum of the rewards from t on, M_t = A*_t + gamma M_t+1. M_t+1 has mean 0 whatever happened up to
# t+1:
#
#     E[A*_t^2] = E[M_t^2] - gamma^2 E[M_t+1^2]
#
# In words: the critic's squared error falls by what the token has decided. The square of the TD error has the same mean
# where V is exact, but takes a critic's random errors for signal; here they cancel, as long as they are as large at t
# as at t + 1, and a critic that is one constant finds no signal at all. At the last token of a response no state
# follows: all that the critic has not foreseen would count as that token's signal, so it is left out.
#
# In closed form, for n fair bits whose ones are paid at the end (E[A*^2] = 1/4, V* = ones so far + (n - t) / 2), with
# the share f and SNR = sqrt(f / (1 - f)): R - mean of K - 1 others has 1 / sqrt(n K / (K - 1) - 1); GAE of the exact
# critic, E[A_t^2] = 1/4 sum_k<n-t lambda^(2k), has sqrt(1 - lambda^2) / lambda far from the end, and 1 / sqrt(n - t -
# 1) with lambda = 1: what a critic gains is by lambda < 1, whose bias is the critic's error.
#
# Suffixes: B samples, K rows of a block, R its generated tokens, N responses with a token.

_SQUARED_ROUNDING = 1e-12
"""Mean squares up to this share of the largest squared outcome or error of a first state are rounding."""


class SignalSummary:
    """advantage/signal_frac_* and critic/mse_vs_*, from blocks of rows that come in the batch's order.

    The baseline of a response is the mean outcome of the others of its group, which has the name `group`, over the
    responses that have such others; where no response has any (K = 1), that of the others of the batch, `batch`.

    advantage/signal_frac_at_0_25 .. at_75_100: sum of A*^2 / sum of A^2 over the tokens in that quarter of their
    response (`compute_quarters`) that are not its last; A as estimated, before whitening and clipping. With the
    signal-to-noise ratio SNR it is SNR^2 / (1 + SNR^2). An estimate: it can be below 0 and above 1.
    advantage/signal_frac_group_at_.. (or _batch_at_..): the same of the advantage outcome - baseline.
    critic/mse_vs_group (or _batch): mean squared error of the critic over all tokens, over that of the baseline.
    critic/mse_vs_group_first (or _batch_first): the same at the first state of each response.
    What is not defined is left out.
    """

    def __init__(self, groups_B: Tensor, lengths_B: Tensor, gamma: float):
        """groups_B: int64 [B]. lengths_B: int64 [B], generated tokens of each response."""
        self._groups_B, self._lengths_B, self._gamma = groups_B, lengths_B, gamma
        self._parts: list[dict[str, NDArray[np.float64]]] = []
        # One for all blocks: fresh memory costs several times what the sums do.
        self._squares = torch.empty(0, dtype=torch.float64)

    def add(self, block: statistics.Block, values_R: Tensor, outcomes_R: Tensor, advantages_R: Tensor) -> None:
        """values (V), outcomes (G) and advantages (A): float64 [R]."""
        lengths = block.lengths[block.lengths > 0]
        if not len(lengths):
            return
        starts = lengths.cumsum(0) - lengths
        # Five parts of each row: the quarters without the last token, and that token.
        ends_K4 = find_quarter_ends(lengths).minimum(lengths[:, None] - 1)
        bounds_K5 = (starts[:, None] + torch.nn.functional.pad(ends_K4, (1, 0))).numpy()
        if len(self._squares) < len(values_R):
            self._squares = torch.empty_like(values_R)
        squares_R = self._squares[: len(values_R)]
        torch.sub(outcomes_R, values_R, out=squares_R).square_()
        errors_K5, at_bounds_K5 = _sum_parts(squares_R.numpy(), bounds_K5), squares_R.numpy()[bounds_K5]
        torch.mul(advantages_R, advantages_R, out=squares_R)
        advantages_K5 = _sum_parts(squares_R.numpy(), bounds_K5)
        decay = self._gamma**2
        signal_K4 = (1 - decay) * errors_K5[:, :4] + decay * (at_bounds_K5[:, :4] - at_bounds_K5[:, 1:])
        self._parts.append(
            {
                "signal": signal_K4,
                "power": advantages_K5[:, :4],
                "error": errors_K5.sum(1),
                "first_error": at_bounds_K5[:, 0],
                "first_outcome": outcomes_R.numpy()[bounds_K5[:, 0]],
            }
        )

    def compute_metrics(self) -> Metrics:
        if not self._parts:
            return {}
        parts = {key: torch.from_numpy(np.concatenate([part[key] for part in self._parts])) for key in self._parts[0]}
        lengths_N, groups_N = (x[self._lengths_B > 0] for x in (self._lengths_B, self._groups_B))
        counts_N4 = find_quarter_ends(lengths_N).minimum(lengths_N[:, None] - 1)
        counts_N4 = counts_N4.diff(dim=1, prepend=torch.zeros(len(counts_N4), 1, dtype=torch.int64))
        smallest = _SQUARED_ROUNDING * float(parts["first_outcome"].square().maximum(parts["first_error"]).max())
        signal_4, power_4, num_4 = parts["signal"].sum(0), parts["power"].sum(0), counts_N4.sum(0)
        metrics = _divide_by_quarter("advantage/signal_frac", signal_4, power_4, num_4 * smallest)
        name, compared_N, error_N = _compute_baseline_error(parts["first_outcome"], groups_N)
        if not bool(compared_N.any()):
            return metrics
        error_N, lengths_N, counts_N4 = error_N[compared_N], lengths_N[compared_N], counts_N4[compared_N]
        signal_4, power_4 = parts["signal"][compared_N].sum(0), (error_N[:, None] * counts_N4).sum(0)
        num_4 = counts_N4.sum(0)
        metrics |= _divide_by_quarter(f"advantage/signal_frac_{name}", signal_4, power_4, num_4 * smallest)
        for suffix, key, weights_N in (("", "error", lengths_N), ("_first", "first_error", torch.ones_like(lengths_N))):
            baseline = float((error_N * weights_N).sum())
            if baseline > smallest * int(weights_N.sum()):
                metrics[f"critic/mse_vs_{name}{suffix}"] = float(parts[key][compared_N].sum()) / baseline
        return metrics


def _sum_parts(x_R: NDArray[np.float64], bounds_K5: NDArray[np.int64]) -> NDArray[np.float64]:
    """Sums of x from each bound to the next, float64 [K, 5]."""
    flat = bounds_K5.reshape(-1)
    sums = np.add.reduceat(x_R, flat)
    # Of an empty part reduceat gives the entry at its start.
    sums[:-1][flat[1:] == flat[:-1]] = 0.0
    return sums.reshape(bounds_K5.shape)


def _compute_baseline_error(outcomes_N: Tensor, groups_N: Tensor) -> tuple[str, Tensor, Tensor]:
    """Name of the baseline; which responses it has others for, bool [N]; (outcome - mean of the others)^2, float64."""
    index, sizes = statistics.compute_group_index(groups_N)
    name = "group"
    if int(sizes.max()) == 1:
        name, index, sizes = "batch", torch.zeros_like(index), torch.tensor([len(index)])
    sums = torch.zeros(len(sizes), dtype=torch.float64).index_add(0, index, outcomes_N)
    num_others = sizes[index] - 1
    others = (sums[index] - outcomes_N) / num_others.clamp(min=1)
    return name, num_others > 0, (outcomes_N - others).square()


def _divide_by_quarter(name: str, signal_4: Tensor, power_4: Tensor, smallest_4: Tensor) -> Metrics:
    """signal / power of each quarter that has some power."""
    numbers = zip(QUARTERS, signal_4.tolist(), power_4.tolist(), smallest_4.tolist(), strict=True)
    return {f"{name}_at_{quarter}": signal / power for quarter, signal, power, smallest in numbers if power > smallest}


# How well the critic knows what is to come: by position, by length, and against the outcome.
#
# Suffixes: B samples, T response positions, N predictions. Everything is over the generated tokens of the global batch,
# in float64; none of it enters a gradient. V is the critic's value before the update, G the return it learns
# (lambda_critic), the outcome the discounted sum of the rewards that followed (G with lambda 1).

NUM_BINS = 10
"""Most bins of a calibration error."""
PREDICTIONS_PER_BIN = 8
"""Fewer would show the outcomes' noise instead of the critic's error."""


class CriticSummary:
    """critic/*, from blocks of rows that come in the batch's order.

    critic/explained_variance: 1 - Var(G - V) / Var(G) over all tokens; value_mean, return_mean: of V and G.
    critic/ev_at_0_25 .. ev_at_75_100: explained variance over the tokens in that quarter of their response.
    critic/ev_length_q1 .. q4: over the responses in that quartile of length, the shortest first.
    critic/calibration_error_first, _slope_first, _corr_first, and .._middle: the value of the first (middle)
    state of each response against the outcome from there on; see `compute_calibration`.
    critic/value_first_q1 .. q4, outcome_first_q1 .. q4, and .._middle: mean value and mean outcome of these states in
    each quartile of value, the lowest first: the points of a reliability diagram.
    advantage/signal_frac_*, critic/mse_vs_*: see `SignalSummary`.
    What is not defined is left out: an empty part, or one whose G (V, outcomes) are all equal.
    """

    def __init__(self, lengths_B: Tensor, groups_B: Tensor, gamma: float):
        """lengths_B: int64 [B], generated tokens of each response. groups_B: int64 [B], equal for the responses to a
        prompt. gamma: algo.gamma.
        """
        lengths = lengths_B.double()
        self._quartiles_B = find_quantiles(lengths[lengths > 0], lengths, 4) if bool(lengths_B.any()) else lengths
        self._signal = SignalSummary(groups_B, lengths_B, gamma)
        self._all, self._value = ExplainedVariance(), statistics.Mean()
        self._quarters = [ExplainedVariance() for _ in QUARTERS]
        self._quartiles = [ExplainedVariance() for _ in range(4)]
        self._states: dict[str, list[Tensor]] = {"first": [], "middle": []}

    def add(
        self, block: statistics.Block, values_R: Tensor, returns_R: Tensor, outcomes_R: Tensor, advantages_R: Tensor
    ) -> None:
        """values (V), returns (G), outcomes and the policy's advantages: float64 [R]."""
        self._signal.add(block, values_R, outcomes_R, advantages_R)
        self._all.add(values_R, returns_R)
        self._value.add(values_R)
        quartiles = block.spread(self._quartiles_B)
        for kinds_R, summaries in ((compute_quarters(block.lengths), self._quarters), (quartiles, self._quartiles)):
            for kind, summary in enumerate(summaries):
                here = (kinds_R == kind).numpy()
                summary.add(*(torch.from_numpy(x.numpy()[here]) for x in (values_R, returns_R)))
        some = block.lengths > 0
        starts = (block.ends - block.lengths)[some]
        for name, states in (("first", starts), ("middle", starts + block.lengths[some] // 2)):
            self._states[name].append(torch.stack([values_R[states], outcomes_R[states]]))

    def compute_metrics(self) -> Metrics:
        if not self._value.count:
            return {}
        metrics = {
            "critic/explained_variance": self._all.value,
            "critic/value_mean": self._value.value,
            "critic/return_mean": self._all.returns.mean,
        }
        parts = {f"at_{name}": part for name, part in zip(QUARTERS, self._quarters, strict=True)}
        parts |= {f"length_q{number}": part for number, part in enumerate(self._quartiles, start=1)}
        metrics |= {f"critic/ev_{name}": part.value for name, part in parts.items() if part.is_defined}
        for name, states in self._states.items():
            predicted, outcomes = torch.cat(states, dim=1)
            calibration = compute_calibration(predicted, outcomes)
            metrics |= {f"critic/calibration_{key}_{name}": value for key, value in calibration.items()}
            for quartile, (value, outcome) in compute_reliability(predicted, outcomes).items():
                metrics |= {f"critic/value_{name}_q{quartile}": value, f"critic/outcome_{name}_q{quartile}": outcome}
        return metrics | self._signal.compute_metrics()


def compute_calibration(predicted_N: Tensor, outcomes_N: Tensor) -> Metrics:
    """How predictions stand to outcomes, float64 [N] both; {} for N = 0.

    error: expected calibration error sum_b n_b/N |mean prediction - mean outcome| over bins b of equal count, in order
    of the prediction, as many as give each 8 predictions, at most 10; equal predictions share a bin. 0 is perfect, the
    unit is that of the reward.
    slope: Cov(prediction, outcome) / Var(prediction); 1 is perfect, below 1 the predictions vary too much.
    corr: Pearson's correlation.
    Slope and corr are left out where the predictions (corr: or the outcomes) are all equal.
    """
    num = predicted_N.numel()
    if num == 0:
        return {}
    num_bins = min(NUM_BINS, max(1, num // PREDICTIONS_PER_BIN))
    bins = find_quantiles(predicted_N, predicted_N, num_bins)
    gaps = torch.zeros(num_bins, dtype=torch.float64).index_add(0, bins, predicted_N - outcomes_N)
    metrics = {"error": float(gaps.abs().sum() / num)}
    if _is_constant(predicted_N):
        return metrics
    v, g = predicted_N - predicted_N.mean(), outcomes_N - outcomes_N.mean()
    metrics["slope"] = float((v * g).sum() / v.square().sum())
    if not _is_constant(outcomes_N):
        metrics["corr"] = float((v * g).sum() / (v.square().sum() * g.square().sum()).sqrt())
    return metrics


def compute_reliability(predicted_N: Tensor, outcomes_N: Tensor) -> dict[int, tuple[float, float]]:
    """Mean prediction and mean outcome in each quartile of the predictions, 1 to 4, float64 [N] both; equal predictions
    share a quartile, and one without any is left out.
    """
    if predicted_N.numel() == 0:
        return {}
    quartiles = find_quantiles(predicted_N, predicted_N, 4)
    means = {}
    for quartile in range(4):
        here = quartiles == quartile
        if bool(here.any()):
            means[quartile + 1] = (float(predicted_N[here].mean()), float(outcomes_N[here].mean()))
    return means


def find_quantiles(values_N: Tensor, values_M: Tensor, num: int) -> Tensor:
    """Which of the `num` quantiles of the first numbers each of the second lies in, from 0; int64 [M].

    Both float64. A number at a limit belongs below it: equal numbers are never split.
    """
    limits = torch.quantile(values_N, torch.arange(1, num, dtype=torch.float64) / num)
    return torch.searchsorted(limits, values_M.contiguous())


def _is_constant(numbers: Tensor) -> bool:
    low, high = numbers.aminmax()
    return is_constant(float(low), float(high))
