"""KL of policy and reference per token, and the adaptive coefficient of the KL in the reward.

k1, k2, k3: http://joschu.net/blog/kl-approx.html. Controller: 1909.08593, section 2.2.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megarl.algo.blocks import Block, check_finite, count_generated, split_blocks
from megarl.algo.losses import aggregate
from megarl.algo.statistics import STD_EPS, RunningMoments, compute_moments, merge_moments
from megarl.config.schema.algo import (
    LARGEST_KL_ERROR,
    AlgoConfig,
    KLConfig,
    KLEstimator,
    LossAggMode,
    NormScope,
    OverlongConfig,
    RewardNormConfig,
)
from megarl.types import Experience, Metrics, check_score


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


def compute_token_kl(experience: Experience, estimator: KLEstimator, block: Block) -> Tensor:
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


def compute_mean_kl(find_kl: Callable[[Block], Tensor], mask_BT: Tensor) -> float:
    """The KL of a batch as one number: the mean over responses of their tokens' means; 0 where there are none.

    find_kl: gives that of a block's tokens, float [R]. mask_BT: bool [B, T].
    """
    lengths, mode = count_generated(mask_BT), LossAggMode["seq-mean-token-mean"]
    counts, blocks = (int(lengths.sum()), int((lengths > 0).sum())), split_blocks(mask_BT)
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


def compute_overlong_penalty(lengths_B: Tensor, config: OverlongConfig, response_length: int) -> Tensor:
    """penalty * clip((response_length - buffer - length) / buffer, -1, 0), float64 [B] (DAPO 2503.14476, equation 13).

    lengths_B: int64 [B], all tokens of each response: the limit counts tokens that were not generated too.
    response_length: the limit.
    """
    buffer = config.count_buffer(response_length)
    start = response_length - buffer
    return config.penalty * ((start - lengths_B.double()) / buffer).clamp(-1.0, 0.0)


def compute_penalised_rewards(
    experience: Experience, algo: AlgoConfig, response_length: int | None, wrong: float = 0.0
) -> Tensor:
    """Scaled rewards plus the overlong penalty where configured, float64 [B]. Raises NonFiniteError, ValueError."""
    check_finite("rewards", experience.rewards)
    rewards = compute_scaled_rewards(experience.rewards, wrong)
    if algo.overlong.penalty == 0:
        return rewards
    if response_length is None:
        raise ValueError(
            "response_length: none found; algo.overlong.penalty > 0 needs rollout.response_length, the limit that the"
            " penalty grows towards"
        )
    lengths = experience.sequences.response_lengths
    return rewards + compute_overlong_penalty(lengths, algo.overlong, response_length)


def update_reward_moments(
    moments: RunningMoments,
    experience: Experience,
    algo: AlgoConfig,
    response_length: int | None = None,
    wrong: float = 0.0,
) -> RunningMoments:
    """The run's moments with this iteration's rewards taken in, without failed samples, for reward_norm=running."""
    experience = drop_failed(experience)
    return merge_moments(moments, compute_penalised_rewards(experience, algo, response_length, wrong))


def compute_normalised_rewards(
    rewards_B: Tensor, groups_B: Tensor, norm: RewardNormConfig, running: RunningMoments | None = None
) -> Tensor:
    """(R - mean) / (std + 1e-6), float64 [B]; 0 where all rewards of a set that normalises are equal."""
    out = rewards_B.double()
    constant = torch.zeros(out.shape, dtype=torch.bool)
    if norm.mean is not NormScope.none:
        moments = compute_moments(rewards_B, groups_B, norm.mean, running)
        out, constant = (out - moments.mean, constant | (moments.constant & (norm.mean is not NormScope.running)))
    if norm.std is not NormScope.none:
        moments = compute_moments(rewards_B, groups_B, norm.std, running)
        out, constant = out / (moments.std + STD_EPS), constant | moments.constant
    return torch.where(constant, 0.0, out)


def compute_shaped_rewards(
    experience: Experience,
    algo: AlgoConfig,
    response_length: int | None = None,
    reward_moments: RunningMoments | None = None,
    wrong: float = 0.0,
) -> Tensor:
    """R' per sample: scale (`wrong`), overlong penalty, normalisation and clipping, in this order; float64 [B]."""
    rewards = compute_penalised_rewards(experience, algo, response_length, wrong)
    rewards = compute_normalised_rewards(rewards, experience.groups, algo.reward_norm, reward_moments)
    if algo.reward_clip is not None:
        rewards = rewards.clamp(-algo.reward_clip, algo.reward_clip)
    return rewards


def compute_turn_rewards(
    experience: Experience,
    algo: AlgoConfig,
    response_length: int | None = None,
    reward_moments: RunningMoments | None = None,
    wrong: float = 0.0,
) -> Tensor | None:
    """The part of R' that stands at the ends of turns before the last, [B, T] in the dtype of `turn_rewards`; None
    where there is none.

    It is (1 - wrong) * reward of the turn / (std + 1e-6), with the std that divides the response's reward, and 0 where
    that reward is one of a set of equal ones. What else R' has is for the end: the mean that is subtracted, the offset
    of `wrong`, the overlong penalty, and what the clip cuts off.
    """
    if experience.turn_rewards is None:
        return None
    check_finite("turn_rewards", experience.turn_rewards)
    scale_B = torch.ones(experience.rewards.shape, dtype=torch.float64)
    if algo.reward_norm.std is not NormScope.none:
        rewards = compute_penalised_rewards(experience, algo, response_length, wrong)
        moments = compute_moments(rewards, experience.groups, algo.reward_norm.std, reward_moments)
        scale_B = torch.where(moments.constant, 0.0, 1 / (moments.std + STD_EPS))
    out = torch.zeros_like(experience.turn_rewards)
    for block in split_blocks(experience.mask):
        turn_rewards = (1 - wrong) * block.flatten(experience.turn_rewards).double()
        block.put(turn_rewards * block.spread(scale_B), out)
    return out


def place_rewards(
    block: Block, rewards_B: Tensor, penalty_BT: Tensor | None, turn_rewards_BT: Tensor | None = None
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
    for block in split_blocks(mask_BT):
        block.put(place_rewards(block, rewards_B, penalty_BT, turn_rewards_BT), out)
    return out


def sum_penalty(penalty_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The KL penalty of all generated tokens of each response, float64 [B]."""
    return torch.cat([block.sum_rows(block.flatten(penalty_BT).double()) for block in split_blocks(mask_BT)])
