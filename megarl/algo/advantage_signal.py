"""How much of an advantage is about its token, and how the critic stands to the mean of the group or of the batch.

The signal of token t is its true advantage, A* = Q(s_t, a_t) - V*(s_t); the rest of an advantage is noise: what other
tokens did. Where the next state is known once the token is, r_t + gamma V*(s_t+1) is Q, and with M_t = G_t - V*(s_t),
G_t the discounted sum of the rewards from t on, M_t = A*_t + gamma M_t+1. M_t+1 has mean 0 whatever happened up to t+1:

    E[A*_t^2] = E[M_t^2] - gamma^2 E[M_t+1^2]

In words: the critic's squared error falls by what the token has decided. The square of the TD error has the same mean
where V is exact, but takes a critic's random errors for signal; here they cancel, as long as they are as large at t as
at t + 1, and a critic that is one constant finds no signal at all. At the last token of a response no state follows:
all that the critic has not foreseen would count as that token's signal, so it is left out.

Suffixes: B samples, K rows of a block, R its generated tokens, N responses with a token.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.algo.blocks import Block
from megarl.algo.diagnostics import QUARTERS, find_quarter_ends
from megarl.algo.statistics import compute_group_index
from megarl.types import Metrics

_ROUNDING = 1e-12
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

    def add(self, block: Block, values_R: Tensor, outcomes_R: Tensor, advantages_R: Tensor) -> None:
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
        smallest = _ROUNDING * float(parts["first_outcome"].square().maximum(parts["first_error"]).max())
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
    index, sizes = compute_group_index(groups_N)
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
