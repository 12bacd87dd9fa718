"""Generalised advantage estimation (1506.02438), with a lambda of its own for policy and critic (2503.01491), the
policy's adapted to the length of the response (2504.05118).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megarl.algo.advantages.reinforce import GAMMA, sum_rewards_to_go
from megarl.algo.declarations import AdvantageEstimator, AdvantageInputs, Advantages, Reads
from megarl.config.schema.algo import ADAPTIVE, AlgoConfig

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algo.blocks import Block


def compute_gae(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lambda_: float | Tensor
) -> Tensor:
    """Generalised advantage estimates [B, T] in the dtype of `values_BT`, 0 outside the mask.

    delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * lambda * A_{t+1}, over the generated tokens only; V
    after the last of them is 0. lambda_: a number, or float [B], one per sample. Computed in float64. Raises
    NonFiniteError for NaN or infinity inside the mask.
    """
    import torch

    from megarl.algo.blocks import split_blocks
    from megarl.algo.finite import check_finite

    check_finite("rewards", rewards_BT, mask_BT)
    check_finite("values", values_BT, mask_BT)
    out = torch.zeros_like(values_BT)
    for block in split_blocks(mask_BT):
        rewards, values = block.flatten(rewards_BT).double(), block.flatten(values_BT).double()
        block.put(sum_gae(rewards, values, block, gamma, lambda_), out)
    return out


def sum_gae(rewards_R: Tensor, values_R: Tensor, block: Block, gamma: float, lambda_: float | Tensor) -> Tensor:
    """As `compute_gae`, for the generated tokens of a block of rows; float64 [R] in and out."""
    import torch

    from megarl.algo.scan import sum_discounted

    following = values_R.roll(-1)
    following[block.ends[block.lengths > 0] - 1] = 0.0
    delta = (rewards_R - values_R).add_(following, alpha=gamma)
    decay = gamma * torch.as_tensor(lambda_, dtype=torch.float64).reshape(-1)
    return sum_discounted(delta, block.lengths, decay if decay.numel() == 1 else decay[block.rows])


def compute_adaptive_lambda(lengths_B: Tensor, length_alpha: float, lambda_min: float) -> Tensor:
    """lambda_i = clip(1 - 1/(length_alpha * l_i), lambda_min, 1), float64 [B] (VAPO, section 4.2).

    lengths_B: int64 [B], generated tokens per response; 0 gives lambda_min.
    """
    lambdas = 1.0 - 1.0 / (length_alpha * lengths_B.double().clamp(min=1.0))
    return lambdas.clamp(min=lambda_min, max=1.0)


def _compute(inputs: AdvantageInputs, algo: AlgoConfig) -> Advantages:

    from megarl.algo.blocks import allocate_zeros, count_generated, split_blocks
    from megarl.algo.critic_diagnostics import CriticSummary

    assert inputs.values_BT is not None  # compute_targets refuses an experience without them
    lengths_B = count_generated(inputs.mask_BT)
    lambda_, metrics = _choose_lambda(lengths_B, algo)
    advantages, returns = (allocate_zeros(inputs.mask_BT.shape, inputs.dtype) for _ in range(2))
    summary = CriticSummary(lengths_B, inputs.groups_B, algo.gamma)
    for block in split_blocks(inputs.mask_BT):
        values, rewards = block.flatten(inputs.values_BT).double(), inputs.place_rewards(block)
        found = for_policy = sum_gae(rewards, values, block, algo.gamma, lambda_)
        block.put(for_policy, advantages)
        if algo.lambda_policy != algo.lambda_critic:
            found = sum_gae(rewards, values, block, algo.gamma, algo.lambda_critic)
        found = found + values
        block.put(found, returns)
        outcomes = found if algo.lambda_critic == 1 else sum_rewards_to_go(rewards, block.lengths, algo.gamma)
        summary.add(block, values, found, outcomes, for_policy)
    return Advantages(advantages, returns, metrics | summary.compute_metrics())


HIGH_LAMBDA = 0.9
"""From here on the lower bound of the adaptive lambda is as good as a lambda that is chosen"""


def _choose_lambda(lengths_B: Tensor, algo: AlgoConfig) -> tuple[float | Tensor, dict[str, float]]:
    if not isinstance(algo.lambda_policy, str):
        return float(algo.lambda_policy), {}
    if algo.lambda_policy != ADAPTIVE:
        raise ValueError(f"algo.lambda_policy: {algo.lambda_policy!r} found; must be a number or {ADAPTIVE}")
    lambdas = compute_adaptive_lambda(lengths_B, algo.length_alpha, algo.lambda_min)
    clipped = float((lambdas <= algo.lambda_min).double().mean()) if lambdas.numel() else 0.0
    if clipped > 0.5 and algo.lambda_min < HIGH_LAMBDA:
        warnings.warn(
            "length-adaptive GAE: more than half of the responses are so short that lambda is at"
            f" algo.lambda_min={algo.lambda_min:g}; raise algo.length_alpha ({algo.length_alpha:g}), whose formula"
            f" 1 - 1/(length_alpha * length) was made for long responses, or algo.lambda_min to {HIGH_LAMBDA:g}",
            RuntimeWarning,
            stacklevel=4,
        )
    mean = float(lambdas.mean()) if lambdas.numel() else 0.0
    return lambdas, {"advantage/lambda_mean": mean, "advantage/lambda_at_min_frac": clipped}


def _format(algo: AlgoConfig, responses_per_prompt: int) -> str:
    lambda_ = algo.lambda_policy
    if lambda_ == ADAPTIVE:
        lambda_ = f"clip(1 - 1/({algo.length_alpha:g} l), {algo.lambda_min:g}, 1)"
    return f"GAE(gamma = {algo.gamma:g}, lambda = {lambda_})"


def _check(algo: AlgoConfig, responses_per_prompt: int, optimizer_steps: int) -> Iterator[str]:
    number = algo.lambda_policy
    if isinstance(number, str):
        if number != ADAPTIVE:
            yield f"algo.lambda_policy: {number!r} found; must be a number from 0 to 1, or {ADAPTIVE}"
    elif not 0 <= number <= 1:
        yield f"algo.lambda_policy: {number} found; must be from 0 to 1, or {ADAPTIVE}"


ADVANTAGE = AdvantageEstimator(
    _format,
    _compute,
    reads=(
        GAMMA,
        Reads(("algo.lambda_policy", "algo.lambda_critic")),
        Reads(
            ("algo.length_alpha", "algo.lambda_min"),
            when=lambda algo: algo.lambda_policy == ADAPTIVE,
            needs=f"algo.lambda_policy={ADAPTIVE}",
        ),
    ),
    check=_check,
    needs_critic=True,
)
