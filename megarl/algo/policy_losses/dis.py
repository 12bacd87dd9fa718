"""Direct double-sided importance sampling: SAO (2607.07508, equations 1 to 3), first in GLM-5 (2602.15763).

The ratio is to the log-probs with which the rollout engine sampled, so that no other weights have to score the
responses, however old they are. A token whose ratio has left the interval is masked, not clipped: unlike under PPO's
clip it has no gradient whatever the sign of its advantage.
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


def compute_dis(
    logprobs_R: Tensor, rollout_logprobs_R: Tensor, advantages_R: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-f(r) A log pi with r = pi / pi_rollout, f(r) = r for 1 - clip_low < r < 1 + clip_high and 0 elsewhere.

    Token losses, float [R], and where f is 0 (bool [R] by metric name). No gradient flows through f(r): that of a token
    in the interval is -r A grad log pi. The paper does not say where its gradient flows. -f(r) A, with a gradient
    through r, has the same one, because grad r = r grad log pi. A ratio that overflows is outside.
    """
    import torch

    ratio = (logprobs_R.detach() - rollout_logprobs_R).exp()
    outside = (ratio <= 1.0 - clip_low) | (ratio >= 1.0 + clip_high)
    return -torch.where(outside, 0.0, ratio) * advantages_R * logprobs_R, {"policy/clip_frac": outside}


def _compute(tokens: PolicyTokens, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    return compute_dis(tokens.logprobs, tokens.rollout_logprobs, tokens.advantages, algo.clip_low, algo.clip_high)


def _format(algo: AlgoConfig) -> str:
    return f"-[{1 - algo.clip_low:g} < r < {1 + algo.clip_high:g}] sg(r) A log pi with r = pi/pi_rollout"


def _check(algo: AlgoConfig, responses_per_prompt: int, optimizer_steps: int) -> Iterator[str]:
    if not 0 < algo.clip_low < 1:
        yield (
            f"algo.clip_low: {algo.clip_low:g} found with algo.surrogate=dis; the ratio must be above 1 - clip_low, so"
            " that at 0 no token of the policy itself is learned from and at 1 there is no bound: must be above 0 and"
            " below 1"
        )
    if algo.clip_high == 0:
        yield (
            "algo.clip_high: 0 found with algo.surrogate=dis; the ratio must be below 1 + clip_high, so that no token"
            " of the policy itself is learned from: must be above 0"
        )


POLICY_LOSS = PolicyLoss(_format, _compute, reads=(CLIP_RANGE,), check=_check, ratio_to_rollout=True)
