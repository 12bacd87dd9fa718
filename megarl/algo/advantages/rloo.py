"""RLOO (2402.14740): each reward against the mean of the others of its group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algo.declarations import AdvantageEstimator, AdvantageInputs, Advantages
from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.algo_choices import NormScope

if TYPE_CHECKING:
    from torch import Tensor


def compute_rloo(returns_B: Tensor, groups_B: Tensor) -> Tensor:
    """A_i = R_i - mean of the other R_j of its group, float64 [B]; 0 in a group of one, where the others have failed.

    returns_B: float [B]. groups_B: int64 [B]. Raises NonFiniteError.
    """
    import torch

    from megarl.algo.finite import check_finite
    from megarl.algo.statistics import compute_group_index, compute_moments

    check_finite("rewards", returns_B)
    index, sizes = compute_group_index(groups_B)
    moments = compute_moments(returns_B, groups_B, NormScope.group)
    scale = (sizes.double() / (sizes - 1).clamp(min=1))[index]
    return torch.where(moments.constant, 0.0, (returns_B.double() - moments.mean) * scale)


def _compute(inputs: AdvantageInputs, algo: AlgoConfig) -> Advantages:
    return Advantages(compute_rloo(inputs.returns_B, inputs.groups_B))


def _format(algo: AlgoConfig, responses_per_prompt: int) -> str:
    return f"R - mean R of the other {responses_per_prompt - 1} responses to the prompt"


ADVANTAGE = AdvantageEstimator(_format, _compute, per_response=True, compares_group=True)
