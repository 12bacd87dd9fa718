"""Experience to training samples: the targets of an iteration (rewards, advantages and returns of its global batch,
the KL of policy and reference per token), and what one iteration hands to the next (statistics, the adaptive
coefficient of the KL in the reward, a critic's curve).

k1, k2, k3: http://joschu.net/blog/kl-approx.html. Controller: 1909.08593, section 2.2.
Suffixes: B samples, T response positions.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from math import sqrt
from statistics import linear_regression
from typing import Any

import torch
from torch import Tensor

from megarl.algo import diagnostics, objective, statistics
from megarl.algo.advantages import update_rho
from megarl.algo.declarations import AdvantageInputs, Advantages
from megarl.algo.losses import aggregate
from megarl.config.schema.algo import (
    LARGEST_KL_ERROR,
    AlgoConfig,
    KLConfig,
    KLEstimator,
    LossAggMode,
    NormScope,
    OverlongConfig,
    RewardNormConfig,
    ValuePretrainConfig,
    compares_pairs,
    needs_reference,
    needs_reward_moments,
    uses_topr,
)
from megarl.config.schema.root import Config
from megarl.types import Experience, Metrics, RolloutTensors, TrainingSamples, check_score

EXPLAINED = "critic/explained_variance"


class Algorithm:
    def __init__(self, config: Config):
        self.config = config
        self.kl, self.reward_moments = KlController(config.algo.kl.coef, config.algo.kl), statistics.RunningMoments()
        self.tether_rho = config.algo.tether.initial
        self.explained: tuple[float, ...] = ()
        """Explained variance of each step of value pretraining so far"""
        objective.load_state(config.algo)

    def state(self) -> dict[str, Any]:
        """The fields of a `TrainerState` that are the algorithm's."""
        return {
            "kl_coef": self.kl.coef,
            "reward_moments": self.reward_moments,
            "tether_rho": self.tether_rho,
            "explained": self.explained,
            "estimator": objective.read_state(self.config.algo),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` gave; other names are ignored."""
        self.kl = replace(self.kl, coef=state["kl_coef"])
        self.reward_moments, self.tether_rho = state["reward_moments"], state["tether_rho"]
        self.explained = state["explained"]
        objective.load_state(self.config.algo, state["estimator"])

    def build_targets(
        self, experience: Experience, iteration: int, *, has_old_logprobs: bool = True
    ) -> tuple[TrainingSamples, Metrics]:
        """Advantages and returns over the global batch, up to iteration 0 Monte-Carlo returns for the critic alone.

        has_old_logprobs: False where the update computes them. Metrics of the critic are those before it learns.
        """
        if compares_pairs(self.config.algo) or self.config.rollout.from_data:
            return build_given_samples(experience), {}
        if iteration <= 0:
            samples, metrics = self._compute(experience, build_pretraining_algo(self.config.algo), True)
            assert experience.values is not None
            assert samples.returns is not None
            explained = diagnostics.compute_explained_variance(experience.values, samples.returns, samples.mask)
            found = {name: value for name, value in metrics.items() if name.startswith("critic/")}
            return samples, found | {EXPLAINED: explained}
        algo = self.config.algo
        samples, metrics = self._compute(experience, algo, has_old_logprobs)
        self.tether_rho = update_rho(self.tether_rho, metrics, algo.tether)
        return samples, metrics

    def end_step(self, metrics: Metrics) -> str | None:
        """Take the explained variance of a step of value pretraining; why it was the last one, None: it was not."""
        self.explained = (*self.explained, metrics[EXPLAINED])
        return find_end(self.config.algo.value_pretrain, self.explained)

    def update_kl(self, experience: Experience, *, is_frozen: bool) -> Metrics:
        """kl/*, after an update; the coefficient follows unless the policy is frozen."""
        kl, metrics = self.kl.update(experience)
        self.kl = self.kl if is_frozen else kl
        return metrics

    def _compute(
        self, experience: Experience, algo: AlgoConfig, has_old_logprobs: bool
    ) -> tuple[TrainingSamples, Metrics]:
        length, wrong = self.config.rollout.response_length, self.config.reward.wrong
        if needs_reward_moments(algo):
            self.reward_moments = update_reward_moments(self.reward_moments, experience, algo, length, wrong)
        samples, metrics = compute_targets(
            experience,
            algo,
            self.kl.coef,
            response_length=length,
            reward_moments=self.reward_moments,
            wrong=wrong,
            tether_rho=self.tether_rho,
            has_old_logprobs=has_old_logprobs,
        )
        warn_of_returns(samples, self.config.critic.value_range)
        return samples, metrics


def build_given_samples(given: RolloutTensors) -> TrainingSamples:
    """What the losses of pairs and of demonstrations read: the tokens, and by a reward above 0 which sample of a pair
    is the better one, and that a demonstration is correct."""
    names = ("advantages", "rollout_logprobs", "old_logprobs")
    unused: dict[str, Any] = dict.fromkeys(names, torch.zeros(()).expand(given.mask.shape))
    unused |= dict.fromkeys(("sampling_logprobs", "ref_logprobs", "old_values", "returns"))
    return TrainingSamples(given.sequences, given.mask, given.mask, given.rewards > 0, **unused)


# Value pretraining (VC-PPO 2503.01491 section 3, VAPO 2504.05118): the critic learns the frozen policy's returns, in
# the iterations up to 0. Explained variance is measured before the critic trains on a rollout: a held-out figure.

NOTHING = 0.01
"""Explained variance up to which a critic is no better than a constant"""
NUM_ERRORS = 1.5
"""Standard errors of the rise that must lie below min_improvement. One would end a tenth of the runs whose explained
variance rises by 0.004 a step under noise of 0.05; two would miss half of the plateaus for 15 steps and longer."""


def build_pretraining_algo(algo: AlgoConfig) -> AlgoConfig:
    """The algorithm with the same rewards, Monte-Carlo returns and advantages, and no KL for the policy alone."""
    return replace(algo, lambda_critic=1.0, lambda_policy=1.0, kl=replace(algo.kl, in_loss=False, in_advantage=False))


def find_end(settings: ValuePretrainConfig, curve: Sequence[float]) -> str | None:
    """Why value pretraining ends after steps of this explained variance; None: it continues.

    It ends after the last step, at `stop_at_explained_variance`, and at a plateau: a line fitted to the last `patience`
    steps rises by less than `min_improvement`, with 1.5 standard errors to spare. The error comes from the scatter
    around the line, so that noise makes value pretraining go on and does not end it.
    """
    goal, patience, least = settings.stop_at_explained_variance, settings.patience, settings.min_improvement
    if goal is not None and curve and curve[-1] >= goal:
        return f"explained variance has reached {curve[-1]:.3f} (aimed at: {goal:g})"
    if patience is not None and len(curve) >= patience:
        rise, error = fit_rise(curve[-patience:])
        if rise + NUM_ERRORS * error < least:
            return f"explained variance has risen by {rise:.3f} +- {error:.3f} in the last {patience} (min {least:g})"
    return f"algo.value_pretrain.steps={settings.steps} are done" if len(curve) >= settings.num_steps else None


def fit_rise(values: Sequence[float]) -> tuple[float, float]:
    """(rise over the n steps of the values on the least-squares line, its standard error); n is 3 or more."""
    steps = range(len(values))
    slope, start = linear_regression(steps, values)
    residuals = sum((value - start - slope * step) ** 2 for step, value in zip(steps, values, strict=True))
    spread = len(values) * (len(values) ** 2 - 1) / 12
    return len(values) * slope, len(values) * sqrt(residuals / (len(values) - 2) / spread)


def describe_end(curve: Sequence[float], reason: str) -> str:
    """One line, and a warning where the critic has learned nothing. reason: of `find_end`."""
    text = f"value pretraining ends after {len(curve)} steps: {reason}"
    if curve[-1] > NOTHING:
        return text
    return (
        f"{text}\nwarning: the critic explains nothing after value pretraining (explained variance {curve[-1]:.3f}): do"
        " the rewards differ at all? More of algo.value_pretrain.steps, another critic.optimizer.lr, or more of"
        " critic.updates_per_policy_update"
    )


def compute_targets(
    experience: Experience,
    algo: AlgoConfig,
    kl_coef: float,
    *,
    response_length: int | None = None,
    reward_moments: statistics.RunningMoments | None = None,
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
    kl_BT, metrics = _compute_penalty(scored, algo.kl, kl_coef)
    turn_rewards_BT = compute_turn_rewards(scored, algo, response_length, reward_moments, wrong)
    values, groups = scored.values, scored.groups
    inputs = AdvantageInputs(
        rewards_B, kl_BT if algo.kl.in_reward else None, mask, groups, values, turn_rewards_BT, dtype, tether_rho
    )
    found = _compute_advantages(inputs, algo)
    fresh = mask if scored.too_stale is None else mask & ~scored.too_stale
    dropped = scored.truncated if algo.overlong.filter else None
    if scored.masked is not None:
        dropped = scored.masked if dropped is None else dropped | scored.masked
    samples = TrainingSamples(
        sequences=scored.sequences,
        mask=mask,
        loss_mask=fresh if dropped is None else fresh & ~dropped[:, None],
        positive=scored.rewards >= algo.positive_threshold,
        advantages=_finish_advantages(found.advantages, mask, algo, dtype, kl_BT if algo.kl.in_advantage else None),
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
    metrics |= diagnostics.compute_replay_metrics(scored) | (
        measure_old_logprobs(scored, algo) if has_old_logprobs else {}
    )
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
    if not objective.reads_old_logprobs(algo):
        return {}
    scored, kl = drop_failed(experience), algo.kl
    metrics = diagnostics.compute_mismatch_metrics(scored, algo.mismatch)
    if kl.in_loss and not kl.is_subtracted and kl.loss_estimator is not KLEstimator.full:
        total = sum(
            float(compute_token_kl(scored, kl.loss_estimator, b).sum()) for b in statistics.split_blocks(scored.mask)
        )
        metrics["kl/mean"] = total / max(int(statistics.count_generated(scored.mask).sum()), 1)
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
        statistics.check_finite(name, tensor, experience.mask)
    for name in ("rewards", "failed", "truncated", "groups", "ages"):
        found = getattr(experience, name).shape
        if found != shape[:1]:
            raise ValueError(f"{name}: shape {list(found)} found; must be one per sample, [{shape[0]}]")
    if bool(experience.mask[experience.failed].any()):
        raise ValueError("mask: found tokens of failed samples; it must have none, since nothing is learned from them")
    if (
        uses_topr(algo)
        and experience.turn_rewards is not None
        and not objective.find_advantage(algo.advantage).per_response
    ):
        raise ValueError(
            f"algo.advantage: {algo.advantage} found with an environment's rewards at the ends of turns; the topr terms"
            " split the responses by the sign of their advantage, one for all tokens: must be"
            f" {objective.name_advantages(per_response=True)}"
        )
    if needs_reference(algo) and experience.ref_logprobs is None:
        raise ValueError("ref_logprobs: none found; a KL term is configured, so the reference must score the responses")
    if objective.needs_critic(algo) and experience.values is None:
        raise ValueError(f"values: none found; algo.advantage={algo.advantage} needs the critic's values")


def _compute_penalty(experience: Experience, config: KLConfig, kl_coef: float) -> tuple[Tensor | None, Metrics]:
    """What is subtracted from the rewards (beta * k per token) or advantages, [B, T] in the dtype of the log-probs, and
    kl/mean; None where nothing is.

    In a token's own advantage the estimate is k1: the expected gradient is then that of KL(policy, reference) at each
    state that the policy visits, with a discount of 0 for later tokens.
    """
    if not config.is_subtracted:
        return None, {}
    coef, estimator = (
        (kl_coef, config.reward_estimator) if config.in_reward else (config.advantage_coef, KLEstimator.k1)
    )
    total, penalty = 0.0, statistics.allocate_zeros(experience.mask.shape, experience.old_logprobs.dtype)
    for block in statistics.split_blocks(experience.mask):
        kl = compute_token_kl(experience, estimator, block)
        total += float(kl.sum())
        block.put(coef * kl, penalty)
    return penalty, {"kl/mean": total / max(int(statistics.count_generated(experience.mask).sum()), 1)}


def _compute_advantages(inputs: AdvantageInputs, algo: AlgoConfig) -> Advantages:
    """What the estimator gives. Raises ValueError for another shape."""
    estimator, mask = objective.find_advantage(algo.advantage), inputs.mask_BT
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


def _finish_advantages(
    advantages: Tensor, mask: Tensor, algo: AlgoConfig, dtype: torch.dtype, penalty_BT: Tensor | None
) -> Tensor:
    """Whitened where configured, less the penalty (of `_compute_penalty`), clipped where configured; [B, T] in
    `dtype`, 0 outside the mask. advantages: float [B] or [B, T]."""

    def find(block: statistics.Block) -> Tensor:
        found = block.spread(advantages) if advantages.dim() == 1 else block.flatten(advantages)
        return found.double()

    statistics.check_finite("advantages", advantages, None if advantages.dim() == 1 else mask)
    whitening = statistics.Whitening.measure(find, mask) if algo.whiten_advantages else None
    out = statistics.allocate_zeros(mask.shape, dtype)
    for block in statistics.split_blocks(mask):
        found = find(block)
        if whitening is not None:
            found = whitening.apply(found)
        if penalty_BT is not None:
            found = found - block.flatten(penalty_BT).double()
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
    generated, learned = statistics.count_generated(mask), statistics.count_generated(loss_mask)
    at = torch.zeros(2, len(diagnostics.QUARTERS), dtype=torch.int64)
    for block in statistics.split_blocks(mask):
        quarters = diagnostics.compute_quarters(block.lengths).long()
        at[0] += quarters.bincount(minlength=len(diagnostics.QUARTERS))
        at[1] += quarters[block.flatten(loss_mask).bool()].bincount(minlength=len(diagnostics.QUARTERS))
    rows = (generated > 0).nonzero()[:, 0]
    by_length = rows[generated[rows].argsort(stable=True)].tensor_split(4)
    found = {f"at_{name}": (int(at[1, i]), int(at[0, i])) for i, name in enumerate(diagnostics.QUARTERS)}
    found |= {f"of_length_{i}": (int(learned[r].sum()), int(generated[r].sum())) for i, r in enumerate(by_length, 1)}
    return {f"policy/learned_frac_{name}": part / whole for name, (part, whole) in found.items() if whole}


def _compute_metrics(samples: TrainingSamples, rewards_B: Tensor, fresh_B: Tensor) -> Metrics:
    """reward/* over the samples of this iteration, advantage/* and policy/* over all that are trained on."""
    mask, metrics = samples.mask, Metrics()
    if bool(fresh_B.any()):
        metrics["reward/positive_frac"] = float(samples.positive[fresh_B].double().mean())
        metrics["reward/shaped_mean"] = float(rewards_B[fresh_B].mean())
    inside = statistics.Summary()
    for block in statistics.split_blocks(mask):
        inside.add(block.flatten(samples.advantages).double())
    if not inside.count:
        return metrics
    if not torch.equal(mask, samples.loss_mask):
        metrics |= measure_learned(mask, samples.loss_mask)
    return metrics | {
        "policy/dropped_frac": float(
            1.0 - statistics.count_generated(samples.loss_mask).sum() / statistics.count_generated(mask).sum()
        ),
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
    (low, high), found = value_range, statistics.Summary()
    for block in statistics.split_blocks(samples.mask):
        found.add(block.flatten(samples.returns).double())
    room = 1e-6 * (high - low)  # rounding of float32
    if found.count and not low - room <= found.low <= found.high <= high + room:
        warnings.warn(
            f"critic.value_range: found [{low:g}, {high:g}] and returns from {found.low:.3g} to {found.high:.3g}; the"
            " critic's values cannot leave its range",
            RuntimeWarning,
            stacklevel=2,
        )


def compute_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate of KL(policy, reference) per token, with d = logprobs - ref_logprobs; same shape and dtype.

    k1 (kl): d; abs: |d|; k2 (mse): d^2/2; k3: exp(-d) + d - 1. Differentiable in `logprobs`. Raises ValueError for
    full, which takes whole distributions (megarl.mcore.logprobs).
    """
    if estimator is KLEstimator.full:
        raise ValueError("KL estimator full: it has no formula in log-probs of sampled tokens; must be k1 to k3 or abs")
    d = logprobs - ref_logprobs
    if estimator is KLEstimator.k1:
        return d
    if estimator is KLEstimator.abs:
        return d.abs()
    if estimator is KLEstimator.k2:
        return 0.5 * d.square()
    # expm1 keeps the digits that exp(-d) - 1 loses near d = 0.
    return torch.expm1(-d) + d


def compute_token_kl(experience: Experience, estimator: KLEstimator, block: statistics.Block) -> Tensor:
    """KL(old policy, reference) per generated token of a block, float64 [R]. Raises ValueError without its `ref_kl`."""
    if estimator is KLEstimator.full:
        if experience.ref_kl is None:
            raise ValueError("ref_kl: none found; algo.kl.reward_estimator=full needs the KL over the vocabulary")
        return block.flatten(experience.ref_kl).double()
    assert experience.ref_logprobs is not None
    old, ref = block.flatten(experience.old_logprobs).double(), block.flatten(experience.ref_logprobs).double()
    return compute_kl(old, ref, estimator)


def compute_adapted_coef(coef: float, kl: float, target: float, horizon: float, num_samples: int) -> float:
    """coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon); the configuration's horizon is above 0.2 *
    num_samples, so that the coefficient stays above 0.
    """
    error = min(max(kl / target - 1.0, -LARGEST_KL_ERROR), LARGEST_KL_ERROR)
    return coef * (1.0 + error * num_samples / horizon)


def compute_mean_kl(find_kl: Callable[[statistics.Block], Tensor], mask_BT: Tensor) -> float:
    """The KL of a batch as one number: the mean over responses of their tokens' means; 0 where there are none.

    find_kl: gives that of a block's tokens, float [R]. mask_BT: bool [B, T].
    """
    lengths, mode = statistics.count_generated(mask_BT), LossAggMode["seq-mean-token-mean"]
    counts, blocks = (int(lengths.sum()), int((lengths > 0).sum())), statistics.split_blocks(mask_BT)
    return sum(float(aggregate(find_kl(x), mode, x.token_rows, x.lengths, *counts)) for x in blocks)


@dataclass(frozen=True)
class KlController:
    """beta of the KL in the reward, from one iteration to the next; fixed where `config.target` is None."""

    coef: float
    config: KLConfig

    def update(self, experience: Experience) -> tuple["KlController", Metrics]:
        """The controller for the next iteration, once per iteration; the coefficient that this one used (kl/coef) and
        the KL that is compared with the target (kl/compared). Failed samples do not count.
        """
        config = self.config
        if not config.in_reward:
            return self, {}
        metrics = {"kl/coef": self.coef}
        if config.target is None:
            return self, metrics
        find_kl = partial(compute_token_kl, experience, config.reward_estimator)
        kl = compute_mean_kl(find_kl, experience.mask)
        coef = compute_adapted_coef(self.coef, kl, config.target, config.horizon, int((~experience.failed).sum()))
        return replace(self, coef=coef), metrics | {"kl/compared": kl}


# From the verifier's scores to the reward of each token: scale, overlong penalty (DAPO 2503.14476, equation 13),
# normalisation, clipping, and the KL penalty (REINFORCE++ 2501.03262). Suffixes: B samples, T response positions.


def drop_failed(experience: Experience) -> Experience:
    """The samples that have a reward."""
    if not bool(experience.failed.any()):
        return experience
    return experience.select((~experience.failed).nonzero()[:, 0])


def compute_scaled_rewards(scores_B: Tensor, wrong: float) -> Tensor:
    """wrong + (1 - wrong) * score, float64 [B]: `wrong` for a score of 0, 1 for a score of 1.

    Raises ValueError where `wrong` is not 0 and a score is outside [0, 1], as of a verifier with a scale of its own.
    """
    scores = scores_B.double()
    if wrong == 0 or not scores.numel():
        return scores
    for score in (float(scores.min()), float(scores.max())):
        check_score(score, wrong)
    return wrong + (1 - wrong) * scores


def compute_decoupled_rewards(experience: Experience, weights: Mapping[str, float]) -> Tensor:
    """sum_k w_k (r_k - mean of its group) / (std of its group + 1e-6), float64 [B], a part that is equal in all of a
    group left out (GDPO 2601.05242, equations 4 and 5). weights: by the names of experience.reward_parts, in order.

    Raises NonFiniteError, and ValueError where rewards stand within the responses.
    """
    if experience.reward_parts is None or experience.turn_rewards is not None:
        found = "no reward_parts" if experience.reward_parts is None else "rewards within the responses"
        raise ValueError(f"algo.reward_norm.parts: {', '.join(weights)} found with {found}; its parts are of responses")
    statistics.check_finite("reward_parts", experience.reward_parts)
    rewards = torch.zeros(experience.rewards.shape, dtype=torch.float64)
    in_group = RewardNormConfig(NormScope.group, NormScope.group)
    for weight, part_B in zip(weights.values(), experience.reward_parts.T, strict=True):
        rewards += weight * compute_normalised_rewards(part_B, experience.groups, in_group)
    return rewards


def compute_overlong_penalty(lengths_B: Tensor, config: OverlongConfig, response_length: int | Tensor) -> Tensor:
    """penalty * clip((response_length - buffer - length) / buffer, -1, 0), float64 [B] (DAPO 2503.14476, equation 13).

    lengths_B: int64 [B], all tokens of each response: the limit counts tokens that were not generated too.
    response_length: the limit, of all or of each, int64 [B].
    """
    buffer: int | Tensor
    if isinstance(response_length, Tensor):
        buffer = torch.tensor([config.count_buffer(limit) for limit in response_length.tolist()])
    else:
        buffer = config.count_buffer(response_length)
    start = response_length - buffer
    return config.penalty * ((start - lengths_B.double()) / buffer).clamp(-1.0, 0.0)


def compute_penalised_rewards(
    experience: Experience, algo: AlgoConfig, response_length: int | None, wrong: float = 0.0
) -> Tensor:
    """Scaled rewards, or those of GDPO, plus the overlong penalty where configured, float64 [B]. Raises NonFiniteError,
    ValueError."""
    statistics.check_finite("rewards", experience.rewards)
    if algo.reward_norm.parts:
        rewards = compute_decoupled_rewards(experience, algo.reward_norm.parts)
    else:
        rewards = compute_scaled_rewards(experience.rewards, wrong)
    if experience.reward_scales is not None:
        rewards = rewards * experience.reward_scales
    if algo.overlong.penalty == 0:
        return rewards
    if response_length is None:
        raise ValueError(
            "response_length: none found; algo.overlong.penalty > 0 needs rollout.response_length, the limit that the"
            " penalty grows towards"
        )
    lengths = experience.sequences.response_lengths
    limits = response_length if experience.length_limits is None else experience.length_limits
    return rewards + compute_overlong_penalty(lengths, algo.overlong, limits)


def update_reward_moments(
    moments: statistics.RunningMoments,
    experience: Experience,
    algo: AlgoConfig,
    response_length: int | None = None,
    wrong: float = 0.0,
) -> statistics.RunningMoments:
    """The run's moments with this iteration's rewards taken in, without failed samples, for reward_norm=running."""
    experience = drop_failed(experience)
    return statistics.merge_moments(moments, compute_penalised_rewards(experience, algo, response_length, wrong))


def compute_normalised_rewards(
    rewards_B: Tensor, groups_B: Tensor, norm: RewardNormConfig, running: statistics.RunningMoments | None = None
) -> Tensor:
    """(R - mean) / (std + 1e-6), float64 [B]; 0 where all rewards of a set that normalises are equal."""
    out = rewards_B.double()
    constant = torch.zeros(out.shape, dtype=torch.bool)
    if norm.mean is not NormScope.none:
        moments = statistics.compute_moments(rewards_B, groups_B, norm.mean, running)
        out, constant = (out - moments.mean, constant | (moments.constant & (norm.mean is not NormScope.running)))
    if norm.std is not NormScope.none:
        moments = statistics.compute_moments(rewards_B, groups_B, norm.std, running)
        out, constant = out / (moments.std + statistics.STD_EPS), constant | moments.constant
    return torch.where(constant, 0.0, out)


def compute_shaped_rewards(
    experience: Experience,
    algo: AlgoConfig,
    response_length: int | None = None,
    reward_moments: statistics.RunningMoments | None = None,
    wrong: float = 0.0,
) -> Tensor:
    """R' per sample: scale (`wrong`, then that of its source), overlong penalty, normalisation and clipping, in this
    order; float64 [B]."""
    rewards = compute_penalised_rewards(experience, algo, response_length, wrong)
    rewards = compute_normalised_rewards(rewards, experience.groups, algo.reward_norm, reward_moments)
    if algo.reward_clip is not None:
        rewards = rewards.clamp(-algo.reward_clip, algo.reward_clip)
    return rewards


def compute_turn_rewards(
    experience: Experience,
    algo: AlgoConfig,
    response_length: int | None = None,
    reward_moments: statistics.RunningMoments | None = None,
    wrong: float = 0.0,
) -> Tensor | None:
    """The part of R' that stands at the ends of turns before the last, [B, T] in the dtype of `turn_rewards`; None
    where there is none.

    It is (1 - wrong) * scale of the source * reward of the turn / (std + 1e-6), with the std that divides the
    response's reward, and 0 where that reward is one of a set of equal ones. What else R' has is for the end: the mean
    that is subtracted, the offset of `wrong`, the overlong penalty, and what the clip cuts off.
    """
    if experience.turn_rewards is None:
        return None
    statistics.check_finite("turn_rewards", experience.turn_rewards)
    scale_B = torch.ones(experience.rewards.shape, dtype=torch.float64)
    if algo.reward_norm.std is not NormScope.none:
        rewards = compute_penalised_rewards(experience, algo, response_length, wrong)
        moments = statistics.compute_moments(rewards, experience.groups, algo.reward_norm.std, reward_moments)
        scale_B = torch.where(moments.constant, 0.0, 1 / (moments.std + statistics.STD_EPS))
    if experience.reward_scales is not None:
        scale_B = scale_B * experience.reward_scales
    out = torch.zeros_like(experience.turn_rewards)
    for block in statistics.split_blocks(experience.mask):
        turn_rewards = (1 - wrong) * block.flatten(experience.turn_rewards).double()
        block.put(turn_rewards * block.spread(scale_B), out)
    return out


def place_rewards(
    block: statistics.Block, rewards_B: Tensor, penalty_BT: Tensor | None, turn_rewards_BT: Tensor | None = None
) -> Tensor:
    """Of a block's tokens, float64 [R]: the turns' rewards, the rest of R' at the last generated token, so that both
    are R', and minus the KL penalty (beta * k) at every generated token.

    A response without generated tokens has no token rewards.
    """
    rest_K = rewards_B[block.rows].double()
    if penalty_BT is None:
        out = torch.zeros(block.num_tokens, dtype=torch.float64)
    else:
        out = -block.flatten(penalty_BT).double()
    if turn_rewards_BT is not None:
        turn_rewards = block.flatten(turn_rewards_BT).double()
        out, rest_K = out + turn_rewards, rest_K - block.sum_rows(turn_rewards)
    some = block.lengths > 0
    out[block.ends[some] - 1] += rest_K[some]
    return out


def compute_token_rewards(
    rewards_B: Tensor, mask_BT: Tensor, penalty_BT: Tensor | None, turn_rewards_BT: Tensor | None = None
) -> Tensor:
    """`place_rewards` of the whole batch, float64 [B, T]; 0 where not generated."""
    out = torch.zeros(mask_BT.shape, dtype=torch.float64)
    for block in statistics.split_blocks(mask_BT):
        block.put(place_rewards(block, rewards_B, penalty_BT, turn_rewards_BT), out)
    return out


def sum_penalty(penalty_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The KL penalty of all generated tokens of each response, float64 [B]."""
    return torch.cat([block.sum_rows(block.flatten(penalty_BT).double()) for block in statistics.split_blocks(mask_BT)])
