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
    from megarl.algo.scan import scan_generated

    return scan_generated(lambda rewards: rewards, (rewards_BT,), mask_BT, gamma, 1.0)


def _compute(inputs: AdvantageInputs, algo: AlgoConfig) -> Advantages:
    return Advantages(compute_reward_to_go(inputs.token_rewards_BT, inputs.mask_BT, algo.gamma))


def _format(algo: AlgoConfig, responses_per_prompt: int) -> str:
    return f"sum_k>=t {algo.gamma:g}^(k-t) reward_k"


ADVANTAGE = AdvantageEstimator(_format, _compute, reads=(GAMMA,))
