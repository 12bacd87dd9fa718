"""The entropy bonus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algo.declarations import LossTerm, Reads
from megarl.config.schema.algo import AlgoConfig, needs_entropy

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algo.tokens import PolicyTokens


def _compute(tokens: PolicyTokens, algo: AlgoConfig) -> Tensor:
    return tokens.require("entropy", tokens.entropy)


TERM = LossTerm(
    needs_entropy,
    lambda algo: f"- {algo.entropy_coef:g} * H",
    _compute,
    weight=lambda algo: -algo.entropy_coef,
    metric="policy/entropy",
    reads=(Reads(("algo.entropy_coef",)),),
)
