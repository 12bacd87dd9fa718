"""Tapered off-policy REINFORCE (TOPR 2503.14286)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megarl.algo.declarations import LossTerm, Reads
from megarl.algo.registry import find_advantage, name_advantages
from megarl.config.schema.algo import AlgoConfig, uses_topr
from megarl.config.schema.algo_choices import RatioLevel

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algo.tokens import PolicyTokens


def compute_topr(
    logprobs_R: Tensor, log_rho_R: Tensor, advantages_R: Tensor, positive_coef: float, negative_coef: float
) -> Tensor:
    """-w_pos A lp where A >= 0; -w_neg clip(rho, 0, 1) A lp where A < 0, no gradient through rho; float [R].

    log_rho_R: log of the ratio to the sampling policy, of the token or of its whole sequence.
    """
    import torch

    taper = log_rho_R.detach().clamp(max=0.0).exp()
    weight = torch.where(advantages_R >= 0, positive_coef, negative_coef * taper)
    return -weight * advantages_R * logprobs_R


def _compute(tokens: PolicyTokens, algo: AlgoConfig) -> Tensor:
    import torch

    topr, targets = algo.topr, tokens.targets
    log_rho = (tokens.logprobs - tokens.rollout_logprobs).detach()
    if topr.ratio_level is RatioLevel.sequence:
        total = torch.zeros(targets.num_rows, dtype=log_rho.dtype, device=log_rho.device)
        log_rho = total.index_add(0, targets.rows, log_rho)[targets.rows]
    return compute_topr(tokens.logprobs, log_rho, tokens.advantages, topr.positive_loss_coef, topr.negative_loss_coef)


def _format(algo: AlgoConfig) -> str:
    rho = "pi/mu" if algo.topr.ratio_level is RatioLevel.token else "prod_t pi/mu"
    return (
        f"{algo.topr.positive_loss_coef:g} * [A >= 0] * -A log pi"
        f" + {algo.topr.negative_loss_coef:g} * [A < 0] * -clip({rho}, 0, 1) A log pi"
    )


def _check(algo: AlgoConfig, responses_per_prompt: int, optimizer_steps: int) -> Iterator[str]:
    # The reward to go is the reward itself, at every token, without a discount and a KL.
    undiscounted = algo.advantage == "reinforce" and algo.gamma == 1 and not algo.kl.in_reward
    if not (find_advantage(algo.advantage).per_response or undiscounted):
        yield (
            f"algo.advantage: {algo.advantage} found; the topr terms split the responses by the sign of their"
            f" advantage, one for all tokens: must be {name_advantages(per_response=True)}, or reinforce with"
            " algo.gamma=1 and algo.kl.in_reward=false"
        )


TERM = LossTerm(
    uses_topr,
    _format,
    _compute,
    weight=lambda algo: 1.0,
    reads=(
        Reads(("algo.topr.positive_loss_coef", "algo.topr.negative_loss_coef")),
        Reads(
            ("algo.topr.ratio_level",),
            when=lambda algo: algo.topr.negative_loss_coef != 0,
            needs="algo.topr.negative_loss_coef above 0",
        ),
    ),
    check=_check,
)
