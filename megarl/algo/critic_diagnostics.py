"""How well the critic knows what is to come: by position, by length, and against the outcome.

Suffixes: B samples, T response positions, N predictions. Everything is over the generated tokens of the global batch,
in float64; none of it enters a gradient. V is the critic's value before the update, G the return it learns
(lambda_critic), the outcome the discounted sum of the rewards that followed (G with lambda 1).
"""

import torch
from torch import Tensor

from megarl.algo.advantage_signal import SignalSummary
from megarl.algo.blocks import Block, count_generated, split_blocks
from megarl.algo.diagnostics import QUARTERS, ExplainedVariance, compute_quarters, is_constant
from megarl.algo.finite import check_finite
from megarl.algo.statistics import Mean
from megarl.types import Metrics

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
        self._all, self._value = ExplainedVariance(), Mean()
        self._quarters = [ExplainedVariance() for _ in QUARTERS]
        self._quartiles = [ExplainedVariance() for _ in range(4)]
        self._states: dict[str, list[Tensor]] = {"first": [], "middle": []}

    def add(self, block: Block, values_R: Tensor, returns_R: Tensor, outcomes_R: Tensor, advantages_R: Tensor) -> None:
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


def compute_critic_metrics(
    values: Tensor,
    returns: Tensor,
    outcomes: Tensor,
    mask: Tensor,
    advantages: Tensor | None = None,
    groups: Tensor | None = None,
    gamma: float = 1.0,
) -> Metrics:
    """`CriticSummary` of a batch. values (V), returns (G), outcomes, advantages (None: returns - values): float [B, T];
    mask: bool [B, T]; groups: int64 [B] (None: one response each). Raises NonFiniteError.
    """
    tensors = {"values": values, "returns": returns, "outcomes": outcomes}
    tensors["advantages"] = returns - values if advantages is None else advantages
    for name, tensor in tensors.items():
        check_finite(name, tensor, mask)
    summary = CriticSummary(count_generated(mask), torch.arange(len(mask)) if groups is None else groups, gamma)
    for block in split_blocks(mask):
        summary.add(block, *(block.flatten(tensor).double() for tensor in tensors.values()))
    return summary.compute_metrics()


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
