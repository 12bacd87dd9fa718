"""The clipped importance ratio of the response: GSPO (2507.18071, equations 5 to 7), without the tokens' own ratios."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algo.declarations import PolicyLoss
from megarl.algo.policy_losses.clip import CLIP_READS, compute_clipped, format_clipped
from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.algo_choices import RatioLevel

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algo.tokens import PolicyTokens


def _compute(tokens: PolicyTokens, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """As `compute_clipped`, with the geometric mean s = exp(mean_t (logprobs - old_logprobs)) of a response as w."""
    from megarl.algo.mismatch import compute_log_ratio

    targets = tokens.targets
    mean = compute_log_ratio(tokens.log_ratio, targets.rows, targets.row_lengths, RatioLevel.geometric)
    return compute_clipped(mean, tokens.advantages, algo.clip_low, algo.clip_high, algo.dual_clip)


def _format(algo: AlgoConfig) -> str:
    return f"{format_clipped(algo, 's')} with s = (prod_t w)^(1/l)"


POLICY_LOSS = PolicyLoss(_format, _compute, reads=CLIP_READS)
