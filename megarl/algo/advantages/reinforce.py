"""REINFORCE: the discounted sum of the rewards to come (REINFORCE++ 2501.03262 whitens it)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algo.declarations import AdvantageEstimator, AdvantageInputs, Advantages, Reads
from megarl.config.schema.algo import AlgoConfig

if TYPE_CHECKING:
    from torch import Tensor

GAMMA = Reads(("algo.gamma",), refused=lambda gamma: gamma != 1)


def compute_reward_to_go(rewards_BT: Tensor, mask_BT: Tensor, gamma: float) -> Tensor:
    """A_t = sum_{k >= t} gamma^(k - t) r_k over the generated tokens, [B, T]; 0 outside the mask.

    rewards_BT: float [B, T]. mask_BT: bool [B, T]. Raises NonFiniteError for NaN or infinity inside the mask.
    """
    import torch

    from megarl.algo.blocks import split_blocks
    from megarl.algo.finite import check_finite

    check_finite("rewards", rewards_BT, mask_BT)
    out = torch.zeros_like(rewards_BT)
    for block in split_blocks(mask_BT):
        block.put(sum_rewards_to_go(block.flatten(rewards_BT).double(), block.lengths, gamma), out)
    return out


def sum_rewards_to_go(rewards_R: Tensor, lengths_B: Tensor, gamma: float) -> Tensor:
    """As `compute_reward_to_go`, for the generated tokens of rows end to end; float64 [R] in and out."""
    import torch

    from megarl.algo.scan import sum_discounted

    return sum_discounted(rewards_R, lengths_B, torch.tensor([gamma], dtype=torch.float64))


def _compute(inputs: AdvantageInputs, algo: AlgoConfig) -> Advantages:

    from megarl.algo.blocks import allocate_zeros, split_blocks

    advantages = allocate_zeros(inputs.mask_BT.shape, inputs.dtype)
    for block in split_blocks(inputs.mask_BT):
        block.put(sum_rewards_to_go(inputs.place_rewards(block), block.lengths, algo.gamma), advantages)
    return Advantages(advantages)


def _format(algo: AlgoConfig, responses_per_prompt: int) -> str:
    return f"sum_k>=t {algo.gamma:g}^(k-t) reward_k"


ADVANTAGE = AdvantageEstimator(_format, _compute, reads=(GAMMA,))
