"""TETHER (2608.16739, section 5 and appendix C): a baseline between the mean of the group's others and the critic's
value, weighted by how well each of them has predicted the returns of the batches before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from megarl.algo.advantages.gae import sum_gae
from megarl.algo.advantages.reinforce import sum_rewards_to_go
from megarl.algo.advantages.rloo import compute_rloo
from megarl.algo.declarations import AdvantageEstimator, AdvantageInputs, Advantages, Reads
from megarl.config.schema.algo import AlgoConfig, TetherConfig
from megarl.config.schema.algo_choices import NormScope

if TYPE_CHECKING:
    from torch import Tensor

RHO, BATCH_RHO = "advantage/tether_rho", "advantage/tether_rho_batch"


def update_rho(rho: float, metrics: Mapping[str, float], config: TetherConfig) -> float:
    """rho_k = d rho_{k-1} + (1 - d) rho_hat, of the next batch (equation 17); rho itself where the batch gives none.

    metrics: of the batch whose advantages were computed with `rho`.
    """
    found = metrics.get(BATCH_RHO)
    return rho if found is None else config.decay * rho + (1 - config.decay) * found


def fit_rho(product: float, square: float) -> float | None:
    """rho_hat = clip(sum A_B D / sum D^2, 0, 1), the least squares of equations 16 and 22 over tokens; None where D is
    0 at each. A_B is the advantage over the group's others, D = V - (their mean) how far the two baselines are apart.
    """
    return min(max(product / square, 0.0), 1.0) if square > 0 else None


def _compute(inputs: AdvantageInputs, algo: AlgoConfig) -> Advantages:
    from megarl.algo.blocks import allocate_zeros, count_generated, split_blocks
    from megarl.algo.critic_diagnostics import CriticSummary

    assert inputs.values_BT is not None  # compute_targets refuses an experience without them
    rho = algo.tether.initial if inputs.tether_rho is None else inputs.tether_rho
    by_group_B, in_company_B = compute_rloo(inputs.returns_B, inputs.groups_B), _find_in_company(inputs.groups_B)
    advantages, returns = (allocate_zeros(inputs.mask_BT.shape, inputs.dtype) for _ in range(2))
    summary = CriticSummary(count_generated(inputs.mask_BT), inputs.groups_B, gamma=1.0)
    product = square = 0.0
    for block in split_blocks(inputs.mask_BT):
        values, rewards = block.flatten(inputs.values_BT).double(), inputs.place_rewards(block)
        outcomes = sum_rewards_to_go(rewards, block.lengths, 1.0)
        by_group, by_value = block.spread(by_group_B), outcomes - values
        mixed = (1 - rho) * by_group + rho * by_value
        block.put(mixed, advantages)
        apart = (by_group - by_value) * block.spread(in_company_B)
        product, square = product + float((by_group * apart).sum()), square + float(apart.square().sum())
        found = sum_gae(rewards, values, block, 1.0, algo.lambda_critic) + values
        block.put(found, returns)
        summary.add(block, values, found, outcomes, mixed)
    fitted = fit_rho(product, square)
    metrics = {RHO: rho} if fitted is None else {RHO: rho, BATCH_RHO: fitted}
    return Advantages(advantages, returns, metrics | summary.compute_metrics())


def _find_in_company(groups_B: Tensor) -> Tensor:
    """bool [B]: another response to the prompt has a reward too."""
    from megarl.algo.statistics import compute_group_index

    index, sizes = compute_group_index(groups_B)
    return (sizes > 1)[index]


def _format(algo: AlgoConfig, responses_per_prompt: int) -> str:
    others = f"mean R of the other {responses_per_prompt - 1} responses to the prompt"
    return (
        f"R - (1 - rho) ({others}) - rho V, rho = {algo.tether.initial:g} at first, then"
        f" {algo.tether.decay:g} rho + {1 - algo.tether.decay:g} (the last batch's)"
    )


def _check(algo: AlgoConfig, responses_per_prompt: int, optimizer_steps: int) -> Iterator[str]:
    if responses_per_prompt < 2:
        yield (
            f"train.responses_per_prompt: {responses_per_prompt} found; algo.advantage=tether compares the responses of"
            " a group, so it must be at least 2"
        )
    if algo.reward_norm.mean is NormScope.group:
        yield (
            "algo.reward_norm.mean: group found; algo.advantage=tether compares the rewards of a group already, so it"
            " must be none (or batch, running)"
        )


ADVANTAGE = AdvantageEstimator(
    _format,
    _compute,
    reads=(Reads(("algo.tether", "algo.lambda_critic")),),
    check=_check,
    needs_critic=True,
)
