"""The KL of policy and reference as a part of the loss (GRPO 2402.03300)."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING

from megarl.algo.declarations import LossTerm, Reads
from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.algo_choices import KLEstimator

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algo.tokens import PolicyTokens

_FORMULAS = {"k1": "d", "abs": "|d|", "k2": "d^2/2", "k3": "(exp(-d) + d - 1)"}


def format_kl(estimator: KLEstimator, policy: str) -> str:
    """The estimate of KL(policy, reference) per token, as the objective is printed."""
    if estimator is KLEstimator.full:
        return f"sum_v {policy}(v) (log {policy}(v) - log pi_ref(v))"
    return f"{_FORMULAS[estimator.name]} with d = log {policy} - log pi_ref"


def _compute(tokens: PolicyTokens, algo: AlgoConfig) -> Tensor:
    from megarl.algo.kl import compute_kl

    if algo.kl.loss_estimator is KLEstimator.full:
        return tokens.require("full_kl", tokens.full_kl)
    ref = tokens.require("ref_logprobs", tokens.targets.ref_logprobs)
    return compute_kl(tokens.logprobs, ref, algo.kl.loss_estimator)


def _format(algo: AlgoConfig) -> str:
    return f"{algo.kl.loss_coef:g} * {format_kl(algo.kl.loss_estimator, 'pi')}"


def _check(algo: AlgoConfig, responses_per_prompt: int, optimizer_steps: int) -> Iterator[str]:
    if not (isfinite(algo.kl.loss_coef) and algo.kl.loss_coef > 0):
        yield f"algo.kl.loss_coef: {algo.kl.loss_coef} found with algo.kl.in_loss=true; must be above 0"
    if algo.kl.loss_estimator is KLEstimator.k1:
        yield (
            "algo.kl.loss_estimator: k1 found; as a loss its expected gradient on-policy is zero, so that it holds"
            " nothing near the reference: must be k2, k3, abs or full"
        )


TERM = LossTerm(
    lambda algo: algo.kl.in_loss,
    _format,
    _compute,
    weight=lambda algo: algo.kl.loss_coef,
    metric="policy/kl_loss",
    reads=(
        Reads(("algo.kl.in_loss",)),
        Reads(
            ("algo.kl.loss_estimator", "algo.kl.loss_coef"),
            when=lambda algo: algo.kl.in_loss,
            needs="algo.kl.in_loss=true",
        ),
    ),
    check=_check,
)
