"""Tapered off-policy REINFORCE (TOPR 2503.14286)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megarl.algo.declarations import LossTerm, Reads
from megarl.algo.registry import find_advantage, name_advantages
from megarl.config.schema.algo import AlgoConfig, ToprConfig, uses_topr
from megarl.config.schema.algo_choices import RatioLevel

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algo.tokens import LossCounts, PolicyTokens

_ZERO, _ONE = 0.01, 0.99
"""A taper below the first is logged as 0, one above the second as 1."""

_RATIOS = {
    RatioLevel.token: "pi/mu",
    RatioLevel.sequence: "prod_t pi/mu",
    RatioLevel.geometric: "(prod_t pi/mu)^(1/l)",
}


def compute_topr(
    logprobs_R: Tensor, log_rho_R: Tensor, advantages_R: Tensor, positive_coef: float, negative_coef: float
) -> Tensor:
    """-w_pos A lp where A >= 0; -w_neg clip(rho, 0, 1) A lp where A < 0, no gradient through rho; float [R].

    log_rho_R: log of the ratio to the sampling policy, of the token or of its whole sequence.
    """
    import torch

    weight = torch.where(advantages_R >= 0, positive_coef, negative_coef * compute_taper(log_rho_R))
    return -weight * advantages_R * logprobs_R


def compute_taper(log_rho_R: Tensor) -> Tensor:
    """clip(rho, 0, 1), the weight of a token of negative advantage, without a gradient; float [R]."""
    return log_rho_R.detach().clamp(max=0.0).exp()


def _compute(tokens: PolicyTokens, algo: AlgoConfig) -> Tensor:
    topr, log_rho = algo.topr, _compute_log_rho(tokens, algo.topr)
    return compute_topr(tokens.logprobs, log_rho, tokens.advantages, topr.positive_loss_coef, topr.negative_loss_coef)


def _compute_log_rho(tokens: PolicyTokens, topr: ToprConfig) -> Tensor:
    from megarl.algo.mismatch import compute_log_ratio

    targets = tokens.targets
    sampling = tokens.require("sampling_logprobs", targets.sampling_logprobs)
    log_rho = tokens.logprobs.detach() - sampling
    return compute_log_ratio(log_rho, targets.rows, targets.row_lengths, topr.ratio_level)


def _measure(tokens: PolicyTokens, algo: AlgoConfig, counts: LossCounts) -> dict[str, Tensor]:
    if counts.num_negative_tokens == 0:
        return {}
    taper = compute_taper(_compute_log_rho(tokens, algo.topr))
    taper = taper[tokens.targets.loss_mask & (tokens.advantages < 0)]
    return {
        "topr/taper_mean": taper.sum() / counts.num_negative_tokens,
        "topr/taper_zero_frac": (taper < _ZERO).to(taper.dtype).sum() / counts.num_negative_tokens,
        "topr/taper_one_frac": (taper > _ONE).to(taper.dtype).sum() / counts.num_negative_tokens,
    }


def _format(algo: AlgoConfig) -> str:
    return (
        f"{algo.topr.positive_loss_coef:g} * [A >= 0] * -A log pi"
        f" + {algo.topr.negative_loss_coef:g} * [A < 0] * -clip({_RATIOS[algo.topr.ratio_level]}, 0, 1) A log pi"
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
    measure=_measure,
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
