"""The language-model loss of the correct responses (VAPO 2504.05118)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algo.declarations import LossTerm, Reads
from megarl.config.schema.algo import AlgoConfig

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algo.tokens import PolicyTokens


def _compute(tokens: PolicyTokens, algo: AlgoConfig) -> Tensor:
    import torch

    return torch.where(tokens.targets.positive, -tokens.logprobs, 0.0)


def _format(algo: AlgoConfig) -> str:
    return (
        f"{algo.positive_lm_coef:g} * mean over the tokens of responses with"
        f" reward >= {algo.positive_threshold:g}[ -log pi ]"
    )


TERM = LossTerm(
    lambda algo: algo.positive_lm_coef != 0.0,
    _format,
    _compute,
    weight=lambda algo: algo.positive_lm_coef,
    metric="policy/positive_lm",
    count=lambda counts: counts.num_positive_tokens,
    reads=(Reads(("algo.positive_lm_coef",)),),
)
