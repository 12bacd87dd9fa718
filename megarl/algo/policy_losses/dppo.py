"""Clipping by probability instead of ratio: DPPO (2602.04879) with its binary total variation, the loss of BPCO.

The divergence of the policy from the one that sampled is estimated from the sampled token alone, as |pi - mu|, with
mu = exp(rollout_logprobs). A rare token may therefore become many times likelier, and a frequent one may not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megarl.algo.declarations import PolicyLoss
from megarl.algo.policy_losses.clip import CLIP_RANGE
from megarl.config.schema.algo import AlgoConfig

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algo.tokens import PolicyTokens


def compute_dppo(
    logprobs_R: Tensor, rollout_logprobs_R: Tensor, advantages_R: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-r A with r = pi / mu; 0 where A > 0 and pi - mu > clip_high, and where A < 0 and mu - pi > clip_low.

    The gradient is that of -min(r A, clip(r, 1 - clip_low / mu, 1 + clip_high / mu) A) (BPCO 2608.23566, equation 2),
    without the bounds, which overflow where mu is tiny; a clipped token has the loss 0 instead of the bound, a
    constant.
    Token losses, float [R], and where they are clipped (bool [R] by metric name). Raises NonFiniteError where r of a
    token that is not clipped overflows.
    """
    import torch

    from megarl.algo.finite import check_finite

    moved = logprobs_R.detach().exp() - rollout_logprobs_R.exp()
    clipped = ((advantages_R > 0) & (moved > clip_high)) | ((advantages_R < 0) & (moved < -clip_low))
    # Replaced before the exponential: an infinite one would make its gradient NaN.
    ratio = torch.where(clipped, 0.0, logprobs_R - rollout_logprobs_R).exp()
    check_finite("importance ratio exp(logprobs - rollout_logprobs)", ratio.detach())
    return torch.where(clipped, 0.0, -ratio * advantages_R), {"policy/clip_frac": clipped}


def _compute(tokens: PolicyTokens, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    return compute_dppo(tokens.logprobs, tokens.rollout_logprobs, tokens.advantages, algo.clip_low, algo.clip_high)


def _format(algo: AlgoConfig) -> str:
    return (
        f"-[pi - mu <= {algo.clip_high:g} where A > 0, mu - pi <= {algo.clip_low:g} where A < 0] r A with r = pi/mu,"
        " mu = pi_rollout"
    )


def _check(algo: AlgoConfig, responses_per_prompt: int, optimizer_steps: int) -> Iterator[str]:
    for key, value in (("clip_low", algo.clip_low), ("clip_high", algo.clip_high)):
        if not 0 < value <= 1:
            yield (
                f"algo.{key}: {value:g} found with algo.surrogate=dppo; it is by how much a token's probability may"
                " change (0.15 to 0.2 in use): must be above 0 and at most 1"
            )


POLICY_LOSS = PolicyLoss(_format, _compute, reads=(CLIP_RANGE,), check=_check, ratio_to_rollout=True)
