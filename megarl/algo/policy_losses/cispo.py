"""The clipped importance ratio as a weight of the log-probs: CISPO (MiniMax-M1 2506.13585, equations 4 and 5).

Unlike under PPO's clip every token has a gradient, also one whose ratio is clipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algo.declarations import PolicyLoss
from megarl.algo.policy_losses.clip import CLIP_RANGE
from megarl.config.schema.algo import AlgoConfig

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algo.tokens import PolicyTokens


def compute_cispo(
    logprobs_R: Tensor, old_logprobs_R: Tensor, advantages_R: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-clip(w, 1 - clip_low, 1 + clip_high) A log pi with w = pi / pi_old, no gradient through the clipped ratio.

    Token losses, float [R], and where the ratio is clipped (bool [R] by metric name). With clip_low = 1 there is no
    lower bound, as in the paper's experiments. A ratio that overflows is clipped.
    """
    ratio = (logprobs_R.detach() - old_logprobs_R).exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantages_R * logprobs_R, {"policy/clip_frac": ratio != weight}


def _compute(tokens: PolicyTokens, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    return compute_cispo(tokens.logprobs, tokens.old_logprobs, tokens.advantages, algo.clip_low, algo.clip_high)


def _format(algo: AlgoConfig) -> str:
    high = f"{1 + algo.clip_high:g}"
    weight = f"min(w, {high})" if algo.clip_low == 1 else f"clip(w, {1 - algo.clip_low:g}, {high})"
    return f"-sg({weight}) A log pi"


POLICY_LOSS = PolicyLoss(_format, _compute, reads=(CLIP_RANGE,))
