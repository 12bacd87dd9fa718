"""A policy loss that the product does not have, as algo.surrogate=claims_bench.losses:SEQUENCE_IS."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algo.declarations import PolicyLoss
from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.algo_choices import RatioLevel

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algo.tokens import PolicyTokens


def _compute(tokens: PolicyTokens, algo: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """-A prod_t w / l of each token: their sum over a response is -A prod_t w, importance sampling without a bound."""
    from megarl.algo.mismatch import compute_log_ratio

    targets = tokens.targets
    log_ratio = compute_log_ratio(tokens.log_ratio, targets.rows, targets.row_lengths, RatioLevel.sequence)
    return -log_ratio.exp() * tokens.advantages / targets.row_lengths[targets.rows], {}


SEQUENCE_IS = PolicyLoss(lambda algo: "-A prod_t w / l", _compute)
