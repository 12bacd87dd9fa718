"""How well the critic knows what is to come: by position, by length, and against the outcome.

Suffixes: B samples, T response positions, N predictions. Everything is over the generated tokens of the global batch,
in float64; none of it enters a gradient. V is the critic's value before the update, G the return it learns
(lambda_critic), the outcome the discounted sum of the rewards that followed (G with lambda 1).
"""

import torch
from torch import Tensor

from megarl.algo.diagnostics import QUARTERS, compute_explained_variance, compute_quarters, is_constant
from megarl.algo.finite import check_finite
from megarl.types import Metrics

NUM_BINS = 10
"""Most bins of a calibration error."""
PREDICTIONS_PER_BIN = 8
"""Fewer would show the outcomes' noise instead of the critic's error."""


def compute_critic_metrics(values: Tensor, returns: Tensor, outcomes: Tensor, mask: Tensor) -> Metrics:
    """critic/*; values (V), returns (G), outcomes: float [B, T]; mask: bool [B, T]. Raises NonFiniteError.

    critic/explained_variance: 1 - Var(G - V) / Var(G) over all tokens; value_mean, return_mean: of V and G.
    critic/ev_at_0_25 .. ev_at_75_100: explained variance over the tokens in that quarter of their response.
    critic/ev_length_q1 .. q4: over the responses in that quartile of length, the shortest first.
    critic/calibration_error_first, _slope_first, _corr_first, and .._middle: the value of the first (middle)
    state of each response against the outcome from there on; see `compute_calibration`.
    What is not defined is left out: an empty part, or one whose G (V, outcomes) are all equal.
    """
    check_finite("outcomes", outcomes, mask)
    if not bool(mask.any()):
        return {}
    metrics = {
        "critic/explained_variance": compute_explained_variance(values, returns, mask),
        "critic/value_mean": float(values[mask].double().mean()),
        "critic/return_mean": float(returns[mask].double().mean()),
    }
    for name, part in _split(mask).items():
        if not is_constant(returns[part]):
            metrics[f"critic/ev_{name}"] = compute_explained_variance(values, returns, part)
    lengths = mask.sum(1)
    order = mask.cumsum(1) - 1
    for name, number in (("first", torch.zeros_like(lengths)), ("middle", lengths // 2)):
        states = mask & (order == number[:, None])
        calibration = compute_calibration(values[states].double(), outcomes[states].double())
        metrics |= {f"critic/calibration_{key}_{name}": value for key, value in calibration.items()}
    return metrics


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
    edges = torch.quantile(predicted_N, torch.arange(1, num_bins, dtype=torch.float64) / num_bins)
    bins = torch.searchsorted(edges, predicted_N.contiguous())
    gaps = torch.zeros(num_bins, dtype=torch.float64).index_add(0, bins, predicted_N - outcomes_N)
    metrics = {"error": float(gaps.abs().sum() / num)}
    if is_constant(predicted_N):
        return metrics
    v, g = predicted_N - predicted_N.mean(), outcomes_N - outcomes_N.mean()
    metrics["slope"] = float((v * g).sum() / v.square().sum())
    if not is_constant(outcomes_N):
        metrics["corr"] = float((v * g).sum() / (v.square().sum() * g.square().sum()).sqrt())
    return metrics


def _split(mask: Tensor) -> dict[str, Tensor]:
    """The tokens (bool [B, T]) of every part that has an explained variance of its own, by name."""
    quarters = compute_quarters(mask)
    parts = {f"at_{name}": quarters == quarter for quarter, name in enumerate(QUARTERS)}
    lengths = mask.sum(1).double()
    # Responses as long as a limit belong below it: equal lengths are never split.
    limits = torch.quantile(lengths[lengths > 0], torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    quartiles = torch.searchsorted(limits, lengths)
    return parts | {f"length_q{q + 1}": mask & (quartiles == q)[:, None] for q in range(4)}
