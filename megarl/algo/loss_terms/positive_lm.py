"""The language-model loss of the correct responses (VAPO 2504.05118)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algo.declarations import LossTerm, Reads
from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.algo_choices import PositiveLMMean

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algo.tokens import LossCounts, PolicyTokens


def _compute(tokens: PolicyTokens, algo: AlgoConfig) -> Tensor:
    import torch

    return torch.where(tokens.targets.positive, -tokens.logprobs, 0.0)


def _format(algo: AlgoConfig) -> str:
    positive = f"responses with reward >= {algo.positive_threshold:g}"
    if _over_all_tokens(algo):
        return f"{algo.positive_lm_coef:g} * 1/N_tok sum over the tokens of {positive}[ -log pi ]"
    return f"{algo.positive_lm_coef:g} * mean over the tokens of {positive}[ -log pi ]"


def _over_all_tokens(algo: AlgoConfig) -> bool:
    return algo.positive_lm_mean_over is PositiveLMMean.all_tokens


def _count(counts: LossCounts, algo: AlgoConfig) -> int:
    return counts.num_tokens if _over_all_tokens(algo) else counts.num_positive_tokens


TERM = LossTerm(
    lambda algo: algo.positive_lm_coef != 0.0,
    _format,
    _compute,
    weight=lambda algo: algo.positive_lm_coef,
    metric="policy/positive_lm",
    count=_count,
    reads=(
        Reads(("algo.positive_lm_coef",)),
        Reads(
            ("algo.positive_lm_mean_over",),
            when=lambda algo: algo.positive_lm_coef != 0,
            needs="algo.positive_lm_coef above 0",
        ),
    ),
)
