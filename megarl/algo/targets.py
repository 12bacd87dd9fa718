"""Experience to training samples: rewards, advantages and returns of one iteration's global batch.

Suffixes: B samples, T response positions.
"""

import warnings
from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from megarl.algo.blocks import Block, allocate_zeros, check_finite, count_generated, split_blocks
from megarl.algo.declarations import AdvantageInputs, Advantages
from megarl.algo.diagnostics import QUARTERS, compute_mismatch_metrics, compute_quarters, compute_replay_metrics
from megarl.algo.registry import find_advantage, name_advantages, needs_critic, reads_old_logprobs
from megarl.algo.rewards import compute_shaped_rewards, compute_token_kl, compute_turn_rewards, drop_failed
from megarl.algo.statistics import RunningMoments, Summary, Whitening
from megarl.config.schema.algo import AlgoConfig, KLEstimator, needs_reference, uses_topr
from megarl.types import Experience, Metrics, TrainingSamples


def compute_targets(
    experience: Experience,
    algo: AlgoConfig,
    kl_coef: float,
    *,
    response_length: int | None = None,
    reward_moments: RunningMoments | None = None,
    wrong: float = 0.0,
    tether_rho: float | None = None,
    has_old_logprobs: bool = True,
) -> tuple[TrainingSamples, Metrics]:
    """Everything that the losses need, in the dtype of `experience.old_logprobs`, and its metrics. Failed samples have
    no targets, and everything is computed as if they were not there.

    kl_coef: beta of the KL in the reward. response_length: rollout.response_length. reward_moments: those of
    reward_norm=running, with this iteration's rewards taken in. wrong: reward.wrong. tether_rho: of advantage=tether;
    None: algo.tether.initial. has_old_logprobs: False where the update computes them itself (`measure_old_logprobs`).
    Raises NonFiniteError for NaN or infinity at generated tokens, ValueError for missing or misshapen inputs.
    """
    _check_experience(experience, algo)
    scored = drop_failed(experience)
    mask, dtype = scored.mask, scored.old_logprobs.dtype
    rewards_B = compute_shaped_rewards(scored, algo, response_length, reward_moments, wrong)
    kl_BT, metrics = _compute_penalty(scored, algo, kl_coef)
    turn_rewards_BT = compute_turn_rewards(scored, algo, response_length, reward_moments, wrong)
    values, groups = scored.values, scored.groups
    inputs = AdvantageInputs(rewards_B, kl_BT, mask, groups, values, turn_rewards_BT, dtype, tether_rho)
    found = _compute_advantages(inputs, algo)
    fresh = mask if scored.too_stale is None else mask & ~scored.too_stale
    samples = TrainingSamples(
        sequences=scored.sequences,
        mask=mask,
        loss_mask=fresh & ~scored.truncated[:, None] if algo.overlong.filter else fresh,
        positive=scored.rewards >= algo.positive_threshold,
        advantages=_finish_advantages(found.advantages, mask, algo, dtype),
        rollout_logprobs=scored.rollout_logprobs,
        old_logprobs=scored.old_logprobs if has_old_logprobs else None,
        sampling_logprobs=scored.sampling_logprobs if uses_topr(algo) else None,
        ref_logprobs=scored.ref_logprobs,
        old_values=scored.values if found.returns is not None else None,
        returns=None if found.returns is None else found.returns.to(dtype),
        critic_mask=None if scored.too_stale is None else fresh,
        critic_sequences=scored.critic_sequences,
    )
    metrics |= dict(found.metrics) | _compute_metrics(samples, rewards_B, scored.ages == 0)
    metrics |= compute_replay_metrics(scored) | (measure_old_logprobs(scored, algo) if has_old_logprobs else {})
    return (samples if scored is experience else _restore_failed(samples, experience)), metrics


def _restore_failed(samples: TrainingSamples, experience: Experience) -> TrainingSamples:
    """Targets of all samples of the experience, from those of the samples with a reward; 0 and False at the others."""
    rows, restored = (~experience.failed).nonzero()[:, 0], {}
    for field in fields(samples):
        value = getattr(samples, field.name)
        if isinstance(value, Tensor):
            value = value.new_zeros((len(experience.failed), *value.shape[1:])).index_copy_(0, rows, value)
        restored[field.name] = value
    unchanged = {name: getattr(experience, name) for name in ("sequences", "critic_sequences")}
    return TrainingSamples(**(restored | unchanged))


def measure_old_logprobs(experience: Experience, algo: AlgoConfig) -> Metrics:
    """mismatch/*, replay/* of the ratios, and kl/mean where a KL on sampled tokens is in the loss alone. Failed samples
    do not count; empty where nothing reads old_logprobs. Raises NonFiniteError.
    """
    if not reads_old_logprobs(algo):
        return {}
    scored, kl = drop_failed(experience), algo.kl
    metrics = compute_mismatch_metrics(scored, algo.mismatch)
    if kl.in_loss and not kl.in_reward and kl.loss_estimator is not KLEstimator.full:
        total = sum(float(compute_token_kl(scored, kl.loss_estimator, b).sum()) for b in split_blocks(scored.mask))
        metrics["kl/mean"] = total / max(int(count_generated(scored.mask).sum()), 1)
    return metrics


def _check_experience(experience: Experience, algo: AlgoConfig) -> None:
    shape = experience.mask.shape
    names = ("old_logprobs", "rollout_logprobs", "sampling_logprobs", "ref_logprobs", "ref_kl", "values")
    for name in (*names, "turn_rewards"):
        tensor: Tensor | None = getattr(experience, name)
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(f"{name}: shape {list(tensor.shape)} found; must be that of the mask, {list(shape)}")
        check_finite(name, tensor, experience.mask)
    for name in ("rewards", "failed", "truncated", "groups", "ages"):
        found = getattr(experience, name).shape
        if found != shape[:1]:
            raise ValueError(f"{name}: shape {list(found)} found; must be one per sample, [{shape[0]}]")
    if bool(experience.mask[experience.failed].any()):
        raise ValueError("mask: found tokens of failed samples; it must have none, since nothing is learned from them")
    if uses_topr(algo) and experience.turn_rewards is not None and not find_advantage(algo.advantage).per_response:
        raise ValueError(
            f"algo.advantage: {algo.advantage} found with an environment's rewards at the ends of turns; the topr terms"
            " split the responses by the sign of their advantage, one for all tokens: must be"
            f" {name_advantages(per_response=True)}"
        )
    if needs_reference(algo) and experience.ref_logprobs is None:
        raise ValueError("ref_logprobs: none found; a KL term is configured, so the reference must score the responses")
    if needs_critic(algo) and experience.values is None:
        raise ValueError(f"values: none found; algo.advantage={algo.advantage} needs the critic's values")


def _compute_penalty(experience: Experience, algo: AlgoConfig, kl_coef: float) -> tuple[Tensor | None, Metrics]:
    """beta * k per token, [B, T] in the dtype of the log-probs, and kl/mean; None where no KL is in the reward."""
    if not algo.kl.in_reward:
        return None, {}
    total, penalty = 0.0, allocate_zeros(experience.mask.shape, experience.old_logprobs.dtype)
    for block in split_blocks(experience.mask):
        kl = compute_token_kl(experience, algo.kl.reward_estimator, block)
        total += float(kl.sum())
        block.put(kl_coef * kl, penalty)
    return penalty, {"kl/mean": total / max(int(count_generated(experience.mask).sum()), 1)}


def _compute_advantages(inputs: AdvantageInputs, algo: AlgoConfig) -> Advantages:
    """What the estimator gives. Raises ValueError for another shape."""
    estimator, mask = find_advantage(algo.advantage), inputs.mask_BT
    found = estimator.compute(inputs, algo)
    for name, tensor, shape in (
        ("advantages", found.advantages, list(mask.shape[:1] if estimator.per_response else mask.shape)),
        ("returns", found.returns, list(mask.shape) if estimator.needs_critic else None),
    ):
        if (None if tensor is None else list(tensor.shape)) != shape:
            raise ValueError(
                f"algo.advantage={algo.advantage}: {name} of shape {None if tensor is None else list(tensor.shape)}"
                f" found; must be {shape}"
            )
    return found


def _finish_advantages(advantages: Tensor, mask: Tensor, algo: AlgoConfig, dtype: torch.dtype) -> Tensor:
    """Whitened and clipped where configured, [B, T] in `dtype`, 0 outside the mask. advantages: float [B] or [B, T]."""

    def find(block: Block) -> Tensor:
        found = block.spread(advantages) if advantages.dim() == 1 else block.flatten(advantages)
        return found.double()

    check_finite("advantages", advantages, None if advantages.dim() == 1 else mask)
    whitening = Whitening.measure(find, mask) if algo.whiten_advantages else None
    out = allocate_zeros(mask.shape, dtype)
    for block in split_blocks(mask):
        found = find(block)
        if whitening is not None:
            found = whitening.apply(found)
        if algo.advantage_clip is not None:
            found = found.clamp(-algo.advantage_clip, algo.advantage_clip)
        block.put(found, out)
    return out


def measure_learned(mask: Tensor, loss_mask: Tensor) -> Metrics:
    """The tokens that the policy learns from over those that it generated: what is dropped by its age or its response's
    length is not a random part. mask, loss_mask: bool [B, T].

    policy/learned_frac_at_0_25 .. at_75_100: by the quarter of its response in which a token lies.
    policy/learned_frac_of_length_1 .. 4: of the quarter of the responses that is the shortest .. the longest.
    """
    generated, learned = count_generated(mask), count_generated(loss_mask)
    at = torch.zeros(2, len(QUARTERS), dtype=torch.int64)
    for block in split_blocks(mask):
        quarters = compute_quarters(block.lengths).long()
        at[0] += quarters.bincount(minlength=len(QUARTERS))
        at[1] += quarters[block.flatten(loss_mask).bool()].bincount(minlength=len(QUARTERS))
    rows = (generated > 0).nonzero()[:, 0]
    by_length = rows[generated[rows].argsort(stable=True)].tensor_split(4)
    found = {f"at_{name}": (int(at[1, i]), int(at[0, i])) for i, name in enumerate(QUARTERS)}
    found |= {f"of_length_{i}": (int(learned[r].sum()), int(generated[r].sum())) for i, r in enumerate(by_length, 1)}
    return {f"policy/learned_frac_{name}": part / whole for name, (part, whole) in found.items() if whole}


def _compute_metrics(samples: TrainingSamples, rewards_B: Tensor, fresh_B: Tensor) -> Metrics:
    """reward/* over the samples of this iteration, advantage/* and policy/* over all that are trained on."""
    mask, metrics = samples.mask, Metrics()
    if bool(fresh_B.any()):
        metrics["reward/positive_frac"] = float(samples.positive[fresh_B].double().mean())
        metrics["reward/shaped_mean"] = float(rewards_B[fresh_B].mean())
    inside = Summary()
    for block in split_blocks(mask):
        inside.add(block.flatten(samples.advantages).double())
    if not inside.count:
        return metrics
    if not torch.equal(mask, samples.loss_mask):
        metrics |= measure_learned(mask, samples.loss_mask)
    return metrics | {
        "policy/dropped_frac": float(1.0 - count_generated(samples.loss_mask).sum() / count_generated(mask).sum()),
        "advantage/mean": inside.mean,
        "advantage/std": inside.std,
        "advantage/max_abs": max(abs(inside.low), abs(inside.high)),
    }


def warn_of_returns(samples: TrainingSamples, value_range: Sequence[float] | None) -> None:
    """RuntimeWarning where a return is outside of critic.value_range, as the checks before a run know of most rewards
    and not of all.
    """
    if value_range is None or samples.returns is None:
        return
    (low, high), found = value_range, Summary()
    for block in split_blocks(samples.mask):
        found.add(block.flatten(samples.returns).double())
    room = 1e-6 * (high - low)  # rounding of float32
    if found.count and not low - room <= found.low <= found.high <= high + room:
        warnings.warn(
            f"critic.value_range: found [{low:g}, {high:g}] and returns from {found.low:.3g} to {found.high:.3g}; the"
            " critic's values cannot leave its range",
            RuntimeWarning,
            stacklevel=2,
        )
