"""The clipped importance ratio of the response: GSPO (2507.18071, equations 5 to 7), without the tokens' own ratios."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algo.declarations import PolicyLoss, Reads, is_on
from megarl.algo.policy_losses.clip import compute_clipped
from megarl.config.schema.algo import AlgoConfig

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algo.tokens import PolicyTokens


def _compute(tokens: PolicyTokens, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """As `compute_clipped`, with the geometric mean s = exp(mean_t (logprobs - old_logprobs)) of a response as w."""
    log_ratio, targets = tokens.log_ratio, tokens.targets
    total = log_ratio.new_zeros(targets.num_rows).index_add(0, targets.rows, log_ratio)
    mean = (total / targets.row_lengths.clamp(min=1))[targets.rows]
    return compute_clipped(mean, tokens.advantages, algo.clip_low, algo.clip_high, algo.dual_clip)


def _format(algo: AlgoConfig) -> str:
    text = f"-min(s A, clip(s, {1 - algo.clip_low:g}, {1 + algo.clip_high:g}) A)"
    if algo.dual_clip is not None:
        text = f"min({text}, {algo.dual_clip:g} |A| where A < 0)"
    return f"{text} with s = (prod_t w)^(1/l)"


POLICY_LOSS = PolicyLoss(
    _format,
    _compute,
    reads=(
        Reads(("algo.clip_low", "algo.clip_high")),
        Reads(("algo.dual_clip",), switch=True, refused=is_on),
    ),
)
