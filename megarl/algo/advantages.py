"""Advantage estimators: what algo.advantage names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from megarl.algo.declarations import AdvantageEstimator, AdvantageInputs, Advantages
from megarl.config.schema.algo import (
    ADAPTIVE,
    NO_ADVANTAGE,
    AdvantageStd,
    AlgoConfig,
    LambdaLevel,
    NormScope,
    StdOf,
    TetherConfig,
)

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algo.statistics import Block


def sum_rewards_to_go(rewards_R: Tensor, lengths_B: Tensor, gamma: float) -> Tensor:
    """A_t = sum_{k >= t} gamma^(k - t) r_k for the generated tokens of rows end to end; float64 [R] in and out."""
    import torch

    from megarl.algo.statistics import sum_discounted

    return sum_discounted(rewards_R, lengths_B, torch.tensor([gamma], dtype=torch.float64))


def _estimate_reinforce(inputs: AdvantageInputs, algo: AlgoConfig) -> Advantages:

    from megarl.algo.statistics import allocate_zeros, split_blocks

    advantages = allocate_zeros(inputs.mask_BT.shape, inputs.dtype)
    for block in split_blocks(inputs.mask_BT):
        block.put(sum_rewards_to_go(inputs.place_rewards(block), block.lengths, algo.gamma), advantages)
    return Advantages(advantages)


def _format_reinforce(algo: AlgoConfig, responses_per_prompt: int) -> str:
    return f"sum_k>=t {algo.gamma:g}^(k-t) reward_k"


REINFORCE = AdvantageEstimator(_format_reinforce, _estimate_reinforce)


# Nothing is learned from rewards; what algo.kl.in_advantage subtracts is the whole advantage.


def _estimate_nothing(inputs: AdvantageInputs, algo: AlgoConfig) -> Advantages:
    from megarl.algo.statistics import allocate_zeros

    return Advantages(allocate_zeros(inputs.mask_BT.shape, inputs.dtype))


def _check_nothing(algo: AlgoConfig, responses_per_prompt: int, optimizer_steps: int) -> Iterator[str]:
    if algo.rl_loss_coef != 0 and not algo.kl.in_advantage:
        yield "algo.advantage: none found with algo.kl.in_advantage=false; nothing is learned: must be another, or true"


NOTHING = AdvantageEstimator(lambda algo, responses_per_prompt: "0", _estimate_nothing, check=_check_nothing)


# Group-relative advantages: GRPO (2402.03300) and LitePPO (2508.08221).


def compute_group_relative(returns_B: Tensor, groups_B: Tensor, std: AdvantageStd, std_of: StdOf) -> Tensor:
    """A_i = R_i - mean of its group, over 1, the group's std (GRPO) or the batch's (LitePPO), float64 [B].

    The batch's std is of the rewards (std_of=raw) or of R - mu_g (centered), and of the population (1/n). A group of
    equal rewards gives 0. returns_B: float [B]. groups_B: int64 [B]. Raises NonFiniteError.
    """
    import torch

    from megarl.algo.statistics import STD_EPS, check_finite, compute_moments

    check_finite("rewards", returns_B)
    group = compute_moments(returns_B, groups_B, NormScope.group)
    centered = torch.where(group.constant, 0.0, returns_B.double() - group.mean)
    if std is AdvantageStd.none:
        return centered
    if std is AdvantageStd.group:
        return centered / (group.std + STD_EPS)
    batch = compute_moments(centered if std_of is StdOf.centered else returns_B, groups_B, NormScope.batch)
    return centered / (batch.std + STD_EPS)


def _estimate_group(inputs: AdvantageInputs, algo: AlgoConfig) -> Advantages:
    return Advantages(compute_group_relative(inputs.returns_B, inputs.groups_B, algo.advantage_std, algo.std_of))


def _format_group(algo: AlgoConfig, responses_per_prompt: int) -> str:
    text = f"R - mean R of the prompt's {responses_per_prompt} responses"
    if algo.advantage_std is AdvantageStd.group:
        return f"({text}) / (std of their R + 1e-6)"
    if algo.advantage_std is AdvantageStd.batch:
        what = "centered R" if algo.std_of is StdOf.centered else "R"
        return f"({text}) / (std of the batch's {what} + 1e-6)"
    return text


GROUP = AdvantageEstimator(_format_group, _estimate_group, per_response=True, compares_group=True)


# RLOO (2402.14740): each reward against the mean of the others of its group.


def compute_rloo(returns_B: Tensor, groups_B: Tensor) -> Tensor:
    """A_i = R_i - mean of the other R_j of its group, float64 [B]; 0 in a group of one, where the others have failed.

    returns_B: float [B]. groups_B: int64 [B]. Raises NonFiniteError.
    """
    import torch

    from megarl.algo.statistics import check_finite, compute_group_index, compute_moments

    check_finite("rewards", returns_B)
    index, sizes = compute_group_index(groups_B)
    moments = compute_moments(returns_B, groups_B, NormScope.group)
    scale = (sizes.double() / (sizes - 1).clamp(min=1))[index]
    return torch.where(moments.constant, 0.0, (returns_B.double() - moments.mean) * scale)


def _estimate_rloo(inputs: AdvantageInputs, algo: AlgoConfig) -> Advantages:
    return Advantages(compute_rloo(inputs.returns_B, inputs.groups_B))


def _format_rloo(algo: AlgoConfig, responses_per_prompt: int) -> str:
    return f"R - mean R of the other {responses_per_prompt - 1} responses to the prompt"


RLOO = AdvantageEstimator(_format_rloo, _estimate_rloo, per_response=True, compares_group=True)


# Generalised advantage estimation (1506.02438), with a lambda of its own for policy and critic (2503.01491), the
# policy's adapted to the length of the response (2504.05118).


def compute_gae(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lambda_: float | Tensor
) -> Tensor:
    """Generalised advantage estimates [B, T] in the dtype of `values_BT`, 0 outside the mask.

    delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * lambda * A_{t+1}, over the generated tokens only; V
    after the last of them is 0. lambda_: a number, or float [B], one per sample. Computed in float64. Raises
    NonFiniteError for NaN or infinity inside the mask.
    """
    import torch

    from megarl.algo.statistics import check_finite, split_blocks

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

    from megarl.algo.statistics import sum_discounted

    following = values_R.roll(-1)
    following[block.ends[block.lengths > 0] - 1] = 0.0
    delta = (rewards_R - values_R).add_(following, alpha=gamma)
    decay = gamma * torch.as_tensor(lambda_, dtype=torch.float64).reshape(-1)
    return sum_discounted(delta, block.lengths, decay if decay.numel() == 1 else decay[block.rows])


def sum_turn_gae(rewards_R: Tensor, values_R: Tensor, block: Block, gamma: float, lambda_: float | Tensor) -> Tensor:
    """As `sum_gae`, with a step for each turn in place of each token: gamma and lambda count once where an observation
    of the environment follows, and are 1 within a turn.

    At a turn's first token it is the estimate over turns of Turn-PPO (2512.17008), with the values of turns' first
    states: delta_n = (rewards of turn n) + gamma V_{n+1} - V_n, A_n = delta_n + gamma lambda A_{n+1}. With lambda 1
    within the turn the sum over its tokens telescopes: A_t = A_n + V_n - V_t - (rewards of turn n before t).
    """
    import numpy as np
    import torch

    first = block.mask & ~np.pad(block.mask, ((0, 0), (1, 0)))[:, :-1]
    turns = replace(block, mask=first, lengths=torch.from_numpy(first.sum(1)))
    starts = torch.from_numpy(np.flatnonzero(first[block.mask]))
    lengths = starts.diff(append=torch.tensor([block.num_tokens]))
    to_go = sum_rewards_to_go(rewards_R, lengths, 1.0)
    own = to_go - values_R
    found = sum_gae(to_go[starts], values_R[starts], turns, gamma, lambda_)
    return own + torch.repeat_interleave(found - own[starts], lengths)


def compute_adaptive_lambda(lengths_B: Tensor, length_alpha: float, lambda_min: float) -> Tensor:
    """lambda_i = clip(1 - 1/(length_alpha * l_i), lambda_min, 1), float64 [B] (VAPO, section 4.2).

    lengths_B: int64 [B], generated tokens per response; 0 gives lambda_min.
    """
    lambdas = 1.0 - 1.0 / (length_alpha * lengths_B.double().clamp(min=1.0))
    return lambdas.clamp(min=lambda_min, max=1.0)


def _estimate_gae(inputs: AdvantageInputs, algo: AlgoConfig) -> Advantages:

    from megarl.algo.diagnostics import CriticSummary
    from megarl.algo.statistics import allocate_zeros, count_generated, split_blocks

    assert inputs.values_BT is not None  # compute_targets refuses an experience without them
    lengths_B = count_generated(inputs.mask_BT)
    lambda_, metrics = _choose_lambda(lengths_B, algo)
    advantages, returns = (allocate_zeros(inputs.mask_BT.shape, inputs.dtype) for _ in range(2))
    by_turn, estimate = algo.lambda_level is LambdaLevel.turn, _find_sum(algo)
    # Most steps from a token to the next have no discount then.
    summary = CriticSummary(lengths_B, inputs.groups_B, 1.0 if by_turn else algo.gamma)
    for block in split_blocks(inputs.mask_BT):
        values, rewards = block.flatten(inputs.values_BT).double(), inputs.place_rewards(block)
        found = for_policy = _sum_for_policy(rewards, values, block, algo, lambda_)
        block.put(for_policy, advantages)
        if algo.lambda_policy != algo.lambda_critic or algo.lambda_floor:
            found = estimate(rewards, values, block, algo.gamma, algo.lambda_critic)
        found = found + values
        block.put(found, returns)
        if algo.lambda_critic == 1:
            outcomes = found
        elif by_turn:
            outcomes = sum_turn_gae(rewards, values.new_zeros(values.shape), block, algo.gamma, 1.0)
        else:
            outcomes = sum_rewards_to_go(rewards, block.lengths, algo.gamma)
        summary.add(block, values, found, outcomes, for_policy)
    return Advantages(advantages, returns, metrics | summary.compute_metrics())


def _find_sum(algo: AlgoConfig) -> Callable[[Tensor, Tensor, Block, float, float | Tensor], Tensor]:
    """Over tokens or over turns"""
    return sum_turn_gae if algo.lambda_level is LambdaLevel.turn else sum_gae


def _sum_for_policy(
    rewards_R: Tensor, values_R: Tensor, block: Block, algo: AlgoConfig, lambda_: float | Tensor
) -> Tensor:
    """GAE of lambda_policy and, for its share algo.lambda_floor, of lambda 1; float64 [R] in and out."""
    estimate, floor = _find_sum(algo), algo.lambda_floor
    found = estimate(rewards_R, values_R, block, algo.gamma, lambda_)
    if floor:
        found = (1 - floor) * found + floor * estimate(rewards_R, values_R, block, algo.gamma, 1.0)
    return found


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


def _format_gae(algo: AlgoConfig, responses_per_prompt: int) -> str:
    return f"{name_gae(algo)}(gamma = {algo.gamma:g}, {_format_lambda(algo)})"


def _format_lambda(algo: AlgoConfig) -> str:
    lambda_ = algo.lambda_policy
    if lambda_ == ADAPTIVE:
        lambda_ = f"clip(1 - 1/({algo.length_alpha:g} l), {algo.lambda_min:g}, 1)"
    floor = f", and 1 for {algo.lambda_floor:g} of it" if algo.lambda_floor else ""
    return f"lambda = {lambda_}{floor}"


def name_gae(algo: AlgoConfig) -> str:
    """As the objective is printed."""
    return "GAE over turns" if algo.lambda_level is LambdaLevel.turn else "GAE"


def _check_gae(algo: AlgoConfig, responses_per_prompt: int, optimizer_steps: int) -> Iterator[str]:
    if isinstance(algo.lambda_policy, str) and algo.lambda_policy != ADAPTIVE:
        yield f"algo.lambda_policy: {algo.lambda_policy!r} found; must be a number from 0 to 1, or {ADAPTIVE}"
    if algo.lambda_policy == ADAPTIVE and algo.lambda_level is LambdaLevel.turn:
        yield (
            f"algo.lambda_policy: {ADAPTIVE} found with algo.lambda_level=turn; it follows from the number of tokens:"
            " must be a number from 0 to 1"
        )


GAE = AdvantageEstimator(_format_gae, _estimate_gae, check=_check_gae, needs_critic=True)


# TETHER (2608.16739, section 5 and appendix C): a baseline between the mean of the group's others and the critic's
# value, weighted by how well each of them has predicted the returns of the batches before.

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


def _estimate_tether(inputs: AdvantageInputs, algo: AlgoConfig) -> Advantages:
    rho = algo.tether.initial if inputs.tether_rho is None else inputs.tether_rho
    found, fitted = _mix_baselines(inputs, algo, lambda block: rho, inputs.groups_B)
    metrics = {RHO: rho} if fitted is None else {RHO: rho, BATCH_RHO: fitted}
    return replace(found, metrics=metrics | dict(found.metrics))


def _mix_baselines(
    inputs: AdvantageInputs,
    algo: AlgoConfig,
    weigh: Callable[[Block], float | Tensor],
    company_B: Tensor,
    lambda_: float | Tensor | None = None,
) -> tuple[Advantages, float | None]:
    """GAE of `lambda_` with the values (1 - w) (b - the rewards before t) + w V_t, b the mean of the others' R; None:
    of lambda 1, which is A_t = (1 - w) (R - b) + w (G_t - V_t). And the one weight that fits the batch (`fit_rho`).

    weigh: w of a block's tokens, a number or float64 [R]. company_B: int64 [B], the others have the same number.
    """
    from megarl.algo.diagnostics import CriticSummary
    from megarl.algo.statistics import allocate_zeros, count_generated, split_blocks

    assert inputs.values_BT is not None  # compute_targets refuses an experience without them
    by_group_B, in_company_B = compute_rloo(inputs.returns_B, company_B), _find_in_company(company_B)
    advantages, returns = (allocate_zeros(inputs.mask_BT.shape, inputs.dtype) for _ in range(2))
    summary = CriticSummary(count_generated(inputs.mask_BT), inputs.groups_B, gamma=1.0)
    product = square = 0.0
    for block in split_blocks(inputs.mask_BT):
        values, rewards = block.flatten(inputs.values_BT).double(), inputs.place_rewards(block)
        outcomes, weight = sum_rewards_to_go(rewards, block.lengths, 1.0), weigh(block)
        by_group, by_value = block.spread(by_group_B), outcomes - values
        mixed = (1 - weight) * by_group + weight * by_value
        apart = (by_group - by_value) * block.spread(in_company_B)
        product, square = product + float((by_group * apart).sum()), square + float(apart.square().sum())
        if lambda_ is not None:
            mixed = _sum_for_policy(rewards, outcomes - mixed, block, algo, lambda_)
        block.put(mixed, advantages)
        found = sum_gae(rewards, values, block, 1.0, algo.lambda_critic) + values
        block.put(found, returns)
        summary.add(block, values, found, outcomes, mixed)
    return Advantages(advantages, returns, summary.compute_metrics()), fit_rho(product, square)


def _find_in_company(groups_B: Tensor) -> Tensor:
    """bool [B]: another response to the prompt has a reward too."""
    from megarl.algo.statistics import compute_group_index

    index, sizes = compute_group_index(groups_B)
    return (sizes > 1)[index]


def _format_tether(algo: AlgoConfig, responses_per_prompt: int) -> str:
    others = f"mean R of the other {responses_per_prompt - 1} responses to the prompt"
    return (
        f"R - (1 - rho) ({others}) - rho V, rho = {algo.tether.initial:g} at first, then"
        f" {algo.tether.decay:g} rho + {1 - algo.tether.decay:g} (the last batch's)"
    )


def _check_tether(algo: AlgoConfig, responses_per_prompt: int, optimizer_steps: int) -> Iterator[str]:
    if responses_per_prompt < 2:
        yield (
            f"train.responses_per_prompt: {responses_per_prompt} found; algo.advantage=tether compares the responses of"
            " a group, so it must be at least 2"
        )
    yield from _check_mixture(algo, responses_per_prompt, optimizer_steps)


def _check_mixture(algo: AlgoConfig, responses_per_prompt: int, optimizer_steps: int) -> Iterator[str]:
    if algo.reward_norm.mean is NormScope.group:
        yield (
            f"algo.reward_norm.mean: group found; algo.advantage={algo.advantage} compares the rewards of a group"
            " already, so it must be none (or batch, running)"
        )


TETHER = AdvantageEstimator(_format_tether, _estimate_tether, check=_check_tether, needs_critic=True)


# Control variate: GAE (1506.02438, equation 16) with TETHER's baseline in place of the value, its weight fitted to this
# batch. With lambda 1 a baseline adds no bias as long as it does not depend on what the response itself has drawn: the
# weight comes from the other prompts alone. At weight 0 the critic has no part: a critic that knows nothing does no
# harm. A lambda below 1 takes credit from what comes much later, which algo.lambda_floor bounds.

CONTROL_WEIGHT = "advantage/control_variate_weight"
_ROUNDING = 1e-12
"""Sums of squares up to this share of the whole batch's are the rounding of a difference."""


def fit_control_weights(inputs: AdvantageInputs, company_B: Tensor) -> Tensor:
    """w of each response, float64 [B], of the other prompts' tokens.

    w = clip(sum A_B D / sum D^2, 0, 1), with A_B and D of `fit_rho`: the least sum of the squared advantages A_B - w D.
    0 where the other prompts have no tokens, and 1 for a response without others to compare it with. company_B: int64
    [B], the others have the same number.
    """
    import torch

    from megarl.algo.statistics import compute_group_index, split_blocks

    assert inputs.values_BT is not None  # compute_targets refuses an experience without them
    by_group_B, in_company_B = compute_rloo(inputs.returns_B, company_B), _find_in_company(company_B)
    index_B, sizes = compute_group_index(inputs.groups_B)
    sums_2G = torch.zeros(2, len(sizes), dtype=torch.float64)
    for block in split_blocks(inputs.mask_BT):
        outcomes = sum_rewards_to_go(inputs.place_rewards(block), block.lengths, 1.0)
        by_group = block.spread(by_group_B)
        apart = (by_group - outcomes + block.flatten(inputs.values_BT).double()) * block.spread(in_company_B)
        for sums, terms in zip(sums_2G, (by_group * apart, apart.square()), strict=True):
            sums.index_add_(0, block.spread(index_B), terms)
    whole_2 = sums_2G.sum(1, keepdim=True)
    product, square = whole_2 - sums_2G
    known = square > _ROUNDING * whole_2[1]
    weight = torch.where(known, product / square.where(known, 1.0), 0.0).clamp(0.0, 1.0)
    return torch.where(in_company_B, weight[index_B], 1.0)


def _estimate_control_variate(inputs: AdvantageInputs, algo: AlgoConfig) -> Advantages:
    from megarl.algo.statistics import count_generated

    lengths_B, company_B = count_generated(inputs.mask_BT), inputs.groups_B
    if not bool(_find_in_company(company_B).any()):
        company_B = company_B.new_zeros(company_B.shape)
    weights_B, (lambda_, metrics) = fit_control_weights(inputs, company_B), _choose_lambda(lengths_B, algo)
    found, _ = _mix_baselines(inputs, algo, lambda block: block.spread(weights_B), company_B, lambda_)
    if num := int(lengths_B.sum()):
        metrics = {CONTROL_WEIGHT: float((weights_B * lengths_B).sum()) / num, **metrics}
    return replace(found, metrics=metrics | dict(found.metrics))


def _format_control_variate(algo: AlgoConfig, responses_per_prompt: int) -> str:
    whose = (
        f"the other {responses_per_prompt - 1} responses to the prompt" if responses_per_prompt > 1 else "the others"
    )
    return (
        f"{name_gae(algo)}({_format_lambda(algo)}) with (1 - w) b + w V for V, b = mean R of {whose}, w ="
        " clip(sum (R - b) (V - b) / sum (V - b)^2, 0, 1) over the other prompts"
    )


def _check_control_variate(algo: AlgoConfig, responses_per_prompt: int, optimizer_steps: int) -> Iterator[str]:
    yield from _check_mixture(algo, responses_per_prompt, optimizer_steps)
    yield from _check_gae(algo, responses_per_prompt, optimizer_steps)


CONTROL_VARIATE = AdvantageEstimator(
    _format_control_variate, _estimate_control_variate, check=_check_control_variate, needs_critic=True
)

ADVANTAGES = {
    "control_variate": CONTROL_VARIATE,
    "gae": GAE,
    "group": GROUP,
    NO_ADVANTAGE: NOTHING,
    "reinforce": REINFORCE,
    "rloo": RLOO,
    "tether": TETHER,
}
"""By the values of algo.advantage"""
