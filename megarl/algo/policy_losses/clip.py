"""The clipped importance ratio: PPO (1707.06347), dual clip (1912.09729), clip-higher (2503.14476)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algo.declarations import PolicyLoss, Reads, is_on
from megarl.config.schema.algo import AlgoConfig

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algo.tokens import PolicyTokens


def compute_clipped(
    log_ratio_R: Tensor, advantages_R: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(w A, clip(w, 1 - clip_low, 1 + clip_high) A), for A < 0 at most dual_clip * |A|, with w = exp(log_ratio).

    Token losses, float [R], and where the clips were active (bool [R] by metric name). log_ratio_R: float [R],
    logprobs - old_logprobs. Raises NonFiniteError where w overflows.
    """
    import torch

    from megarl.algo.finite import check_finite

    ratio = log_ratio_R.exp()
    check_finite("importance ratio exp(logprobs - old_logprobs)", ratio.detach())
    free = -ratio * advantages_R
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_R
    loss = torch.maximum(free, clipped)
    flags = {"policy/clip_frac": clipped > free}
    if dual_clip is not None:
        bound = -dual_clip * advantages_R
        bounded = (advantages_R < 0) & (loss > bound)
        loss = torch.where(bounded, bound, loss)
        flags["policy/dual_clip_frac"] = bounded
    return loss, flags


def _compute(tokens: PolicyTokens, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    return compute_clipped(tokens.log_ratio, tokens.advantages, algo.clip_low, algo.clip_high, algo.dual_clip)


def format_clipped(algo: AlgoConfig, ratio: str = "w") -> str:
    """The formula of `compute_clipped`, with this symbol for the ratio."""
    text = f"-min({ratio} A, clip({ratio}, {1 - algo.clip_low:g}, {1 + algo.clip_high:g}) A)"
    return text if algo.dual_clip is None else f"min({text}, {algo.dual_clip:g} |A| where A < 0)"


CLIP_RANGE = Reads(("algo.clip_low", "algo.clip_high"))
CLIP_READS = (
    CLIP_RANGE,
    Reads(("algo.dual_clip",), switch=True, refused=is_on),
)
"""The keys of `compute_clipped`."""
POLICY_LOSS = PolicyLoss(format_clipped, _compute, reads=CLIP_READS)
