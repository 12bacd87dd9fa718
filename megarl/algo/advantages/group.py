"""Group-relative advantages: GRPO (2402.03300) and LitePPO (2508.08221)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algo.declarations import AdvantageEstimator, AdvantageInputs, Advantages, Reads, is_on
from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.algo_choices import AdvantageStd, NormScope, StdOf

if TYPE_CHECKING:
    from torch import Tensor


def compute_group_relative(returns_B: Tensor, groups_B: Tensor, std: AdvantageStd, std_of: StdOf) -> Tensor:
    """A_i = R_i - mean of its group, over 1, the group's std (GRPO) or the batch's (LitePPO), float64 [B].

    The batch's std is of the rewards (std_of=raw) or of R - mu_g (centered), and of the population (1/n). A group of
    equal rewards gives 0. returns_B: float [B]. groups_B: int64 [B]. Raises NonFiniteError.
    """
    import torch

    from megarl.algo.finite import check_finite
    from megarl.algo.statistics import STD_EPS, compute_moments

    check_finite("rewards", returns_B)
    group = compute_moments(returns_B, groups_B, NormScope.group)
    centered = torch.where(group.constant, 0.0, returns_B.double() - group.mean)
    if std is AdvantageStd.none:
        return centered
    if std is AdvantageStd.group:
        return centered / (group.std + STD_EPS)
    batch = compute_moments(centered if std_of is StdOf.centered else returns_B, groups_B, NormScope.batch)
    return centered / (batch.std + STD_EPS)


def _compute(inputs: AdvantageInputs, algo: AlgoConfig) -> Advantages:
    return Advantages(compute_group_relative(inputs.returns_B, inputs.groups_B, algo.advantage_std, algo.std_of))


def _format(algo: AlgoConfig, responses_per_prompt: int) -> str:
    text = f"R - mean R of the prompt's {responses_per_prompt} responses"
    if algo.advantage_std is AdvantageStd.group:
        return f"({text}) / (std of their R + 1e-6)"
    if algo.advantage_std is AdvantageStd.batch:
        what = "centered R" if algo.std_of is StdOf.centered else "R"
        return f"({text}) / (std of the batch's {what} + 1e-6)"
    return text


ADVANTAGE = AdvantageEstimator(
    _format,
    _compute,
    reads=(
        Reads(("algo.advantage_std",), switch=True, refused=is_on),
        Reads(
            ("algo.std_of",),
            when=lambda algo: algo.advantage_std is AdvantageStd.batch,
            needs="algo.advantage_std=batch",
            switch=True,
            refused=is_on,
        ),
    ),
    per_response=True,
    compares_group=True,
)
