"""Experience to training samples: rewards, advantages and returns of one iteration's global batch.

Suffixes: B samples, T response positions.
"""

import warnings
from dataclasses import replace

import torch
from torch import Tensor

from megarl.algo.advantages import (
    compute_adaptive_lambda,
    compute_gae,
    compute_group_relative,
    compute_reward_to_go,
    compute_rloo,
    compute_whitened,
)
from megarl.algo.critic_diagnostics import compute_critic_metrics
from megarl.algo.diagnostics import compute_mismatch_metrics
from megarl.algo.finite import check_finite
from megarl.algo.kl import compute_token_kl
from megarl.algo.rewards import compute_shaped_rewards, compute_token_rewards
from megarl.algo.statistics import RunningMoments
from megarl.config.schema.algo import ADAPTIVE, AlgoConfig, needs_reference
from megarl.config.schema.algo_choices import Advantage, KLEstimator
from megarl.types import Experience, Metrics, TrainingSamples


def compute_targets(
    experience: Experience,
    algo: AlgoConfig,
    kl_coef: float,
    *,
    response_length: int | None = None,
    reward_moments: RunningMoments | None = None,
) -> tuple[TrainingSamples, Metrics]:
    """Everything that the losses need, in the dtype of `experience.old_logprobs`, and its metrics.

    kl_coef: beta of the KL in the reward. response_length: rollout.response_length, needed by
    algo.overlong.penalty. reward_moments: needed by reward_norm=running, with this iteration's rewards taken
    in (`update_reward_moments`). Raises NonFiniteError for NaN or infinity at generated tokens, ValueError
    for missing or misshapen inputs.
    """
    _check_experience(experience, algo)
    mask, dtype = experience.mask, experience.old_logprobs.dtype
    rewards_B = compute_shaped_rewards(experience, algo, response_length, reward_moments)
    kl_BT, metrics = _compute_penalty(experience, algo, kl_coef)
    advantages, returns, more = _compute_advantages(experience, algo, rewards_B, kl_BT)
    if algo.whiten_advantages:
        advantages = compute_whitened(advantages, mask)
    if algo.advantage_clip is not None:
        advantages = advantages.clamp(-algo.advantage_clip, algo.advantage_clip)
    kept_B = ~experience.truncated if algo.overlong.filter else torch.ones_like(experience.truncated)
    samples = TrainingSamples(
        sequences=experience.sequences,
        mask=mask,
        loss_mask=mask & kept_B[:, None],
        positive=experience.rewards >= algo.positive_threshold,
        advantages=advantages.to(dtype),
        rollout_logprobs=experience.rollout_logprobs,
        old_logprobs=experience.old_logprobs,
        ref_logprobs=experience.ref_logprobs,
        old_values=experience.values if returns is not None else None,
        returns=None if returns is None else returns.to(dtype),
    )
    metrics |= more | _compute_metrics(samples, rewards_B, experience.ages == 0)
    return samples, metrics | compute_mismatch_metrics(experience, algo.mismatch)


def monte_carlo(algo: AlgoConfig) -> AlgoConfig:
    """The same algorithm with Monte-Carlo returns for the critic: what value pretraining regresses on."""
    return replace(algo, lambda_critic=1.0)


def _check_experience(experience: Experience, algo: AlgoConfig) -> None:
    shape = experience.mask.shape
    names = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "ref_kl", "values")
    for name in names:
        tensor: Tensor | None = getattr(experience, name)
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(f"{name}: shape {list(tensor.shape)} found; must be that of the mask, {list(shape)}")
        check_finite(name, tensor, experience.mask)
    for name in ("rewards", "truncated", "groups", "ages"):
        found = getattr(experience, name).shape
        if found != shape[:1]:
            raise ValueError(f"{name}: shape {list(found)} found; must be one per sample, [{shape[0]}]")
    if needs_reference(algo) and experience.ref_logprobs is None:
        raise ValueError("ref_logprobs: none found; a KL term is configured, so the reference must score the responses")
    if algo.advantage is Advantage.gae and experience.values is None:
        raise ValueError("values: none found; algo.advantage=gae needs the critic's values")


def _compute_penalty(experience: Experience, algo: AlgoConfig, kl_coef: float) -> tuple[Tensor | None, Metrics]:
    """beta * k per token, float64 [B, T], or None where no KL is in the reward; and kl/mean where there is a KL
    (one that is in the loss only, of estimator full, shows as policy/kl_loss alone).
    """
    estimator = algo.kl.reward_estimator if algo.kl.in_reward else algo.kl.loss_estimator
    if not algo.kl.in_reward and (not algo.kl.in_loss or estimator is KLEstimator.full):
        return None, {}
    kl = compute_token_kl(experience, estimator)
    metrics = {"kl/mean": float(kl.sum() / experience.mask.sum().clamp(min=1))}
    return (kl_coef * kl if algo.kl.in_reward else None), metrics


def _compute_advantages(
    experience: Experience, algo: AlgoConfig, rewards_B: Tensor, penalty_BT: Tensor | None
) -> tuple[Tensor, Tensor | None, Metrics]:
    """Advantages float [B, T], the critic's returns (gae only), and metrics."""
    mask = experience.mask
    if algo.advantage is Advantage.gae:
        return _compute_gae_targets(experience, algo, compute_token_rewards(rewards_B, mask, penalty_BT))
    if algo.advantage is Advantage.reinforce:
        token_rewards = compute_token_rewards(rewards_B, mask, penalty_BT)
        return compute_reward_to_go(token_rewards, mask, algo.gamma), None, {}
    # One reward per response: the KL of all its tokens is part of it, for the peers too.
    returns_B = rewards_B if penalty_BT is None else rewards_B - penalty_BT.sum(1)
    if algo.advantage is Advantage.rloo:
        advantages_B = compute_rloo(returns_B, experience.groups)
    else:
        advantages_B = compute_group_relative(returns_B, experience.groups, algo.advantage_std, algo.std_of)
    return torch.where(mask, advantages_B[:, None], 0.0), None, {}


def _compute_gae_targets(
    experience: Experience, algo: AlgoConfig, token_rewards: Tensor
) -> tuple[Tensor, Tensor, Metrics]:
    assert experience.values is not None  # checked on entry
    mask, values = experience.mask, experience.values.double()
    lambda_, metrics = _choose_lambda(mask, algo)
    advantages = compute_gae(token_rewards, values, mask, algo.gamma, lambda_)
    to_returns = (
        advantages
        if algo.lambda_policy == algo.lambda_critic
        else compute_gae(token_rewards, values, mask, algo.gamma, algo.lambda_critic)
    )
    returns = torch.where(mask, to_returns + values, 0.0)
    outcomes = returns if algo.lambda_critic == 1 else compute_reward_to_go(token_rewards, mask, algo.gamma)
    return advantages, returns, metrics | compute_critic_metrics(values, returns, outcomes, mask)


def _choose_lambda(mask_BT: Tensor, algo: AlgoConfig) -> tuple[float | Tensor, Metrics]:
    if not isinstance(algo.lambda_policy, str):
        return float(algo.lambda_policy), {}
    if algo.lambda_policy != ADAPTIVE:
        raise ValueError(f"algo.lambda_policy: {algo.lambda_policy!r} found; must be a number or {ADAPTIVE}")
    lambdas = compute_adaptive_lambda(mask_BT.sum(1), algo.length_alpha, algo.lambda_min)
    clipped = float((lambdas <= algo.lambda_min).double().mean()) if lambdas.numel() else 0.0
    if clipped > 0.5:
        warnings.warn(
            "length-adaptive GAE: more than half of the responses are so short that lambda is at "
            f"algo.lambda_min={algo.lambda_min:g}; raise algo.length_alpha ({algo.length_alpha:g}), whose "
            f"formula "
            "1 - 1/(length_alpha * length) was made for long responses",
            RuntimeWarning,
            stacklevel=4,
        )
    mean = float(lambdas.mean()) if lambdas.numel() else 0.0
    return lambdas, {"advantage/lambda_mean": mean, "advantage/lambda_at_min_frac": clipped}


def _compute_metrics(samples: TrainingSamples, rewards_B: Tensor, fresh_B: Tensor) -> Metrics:
    """reward/* over the samples of this iteration, advantage/* and policy/* over all that are trained on."""
    mask, metrics = samples.mask, Metrics()
    if bool(fresh_B.any()):
        metrics["reward/positive_frac"] = float(samples.positive[fresh_B].double().mean())
        metrics["reward/shaped_mean"] = float(rewards_B[fresh_B].mean())
    inside = samples.advantages[mask].double()
    if inside.numel() == 0:
        return metrics
    return metrics | {
        "policy/dropped_frac": float(1.0 - samples.loss_mask.sum() / mask.sum()),
        "advantage/mean": float(inside.mean()),
        "advantage/std": float(inside.std(correction=0)),
        "advantage/max_abs": float(inside.abs().max()),
    }
