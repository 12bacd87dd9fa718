"""KL of policy and reference per token, and the adaptive coefficient of the KL in the reward.

k1, k2, k3: http://joschu.net/blog/kl-approx.html. Controller: 1909.08593, section 2.2.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megarl.algo.aggregation import aggregate
from megarl.algo.blocks import Block, count_generated, split_blocks
from megarl.config.schema.algo import LARGEST_KL_ERROR, KLConfig
from megarl.config.schema.algo_choices import KLEstimator, LossAggMode
from megarl.types import Experience, Metrics


def compute_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate of KL(policy, reference) per token, with d = logprobs - ref_logprobs; same shape and dtype.

    k1 (kl): d; abs: |d|; k2 (mse): d^2/2; k3: exp(-d) + d - 1. Differentiable in `logprobs`. Raises ValueError for
    full, which takes whole distributions (megarl.mcore.full_kl).
    """
    if estimator is KLEstimator.full:
        raise ValueError(
            "KL estimator full: it has no formula in log-probs of sampled tokens; must be k1, abs, k2 or k3"
        )
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
    """KL(old policy, reference) per generated token of a block, float64 [R].

    Raises ValueError when the experience has no reference log-probs, or under full no `ref_kl`.
    """
    if estimator is KLEstimator.full:
        if experience.ref_kl is None:
            raise ValueError("ref_kl: none found; algo.kl.reward_estimator=full needs the KL over the vocabulary")
        return block.flatten(experience.ref_kl).double()
    if experience.ref_logprobs is None:
        raise ValueError("ref_logprobs: none found; a KL term is configured, so the reference must score the responses")
    old, ref = block.flatten(experience.old_logprobs).double(), block.flatten(experience.ref_logprobs).double()
    return compute_kl(old, ref, estimator)


def compute_adapted_coef(coef: float, kl: float, target: float, horizon: float, num_samples: int) -> float:
    """coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon).

    Raises ValueError for a horizon of at most 0.2 * num_samples, under which the coefficient could reach 0 or less.
    """
    if horizon <= LARGEST_KL_ERROR * num_samples:
        raise ValueError(
            f"algo.kl.horizon: found {horizon:g} with {num_samples} samples; it must be above"
            f" {LARGEST_KL_ERROR * num_samples:g}, for the coefficient to stay above 0"
        )
    error = min(max(kl / target - 1.0, -LARGEST_KL_ERROR), LARGEST_KL_ERROR)
    return coef * (1.0 + error * num_samples / horizon)


def compute_mean_kl(find_kl: Callable[[Block], Tensor], mask_BT: Tensor, mode: LossAggMode) -> float:
    """The KL of a batch as one number, aggregated over its generated tokens as a loss is; 0 where there are none.

    find_kl: gives that of a block's tokens, float [R]. mask_BT: bool [B, T]. Sequences without generated tokens do not
    count. Raises ValueError for seq-mean-token-sum-norm.
    """
    lengths = count_generated(mask_BT)
    counts = int(lengths.sum()), int((lengths > 0).sum())
    return sum(
        float(aggregate(find_kl(block), mode, block.token_rows, block.lengths, *counts))
        for block in split_blocks(mask_BT)
    )


@dataclass(frozen=True)
class KlController:
    """beta of the KL in the reward, from one iteration to the next; fixed where `target` is None."""

    coef: float
    target: float | None
    horizon: float
    agg_mode: LossAggMode
    estimator: KLEstimator
    in_reward: bool

    @classmethod
    def start(cls, config: KLConfig) -> "KlController":
        return cls(
            coef=config.coef,
            target=config.target,
            horizon=config.horizon,
            agg_mode=config.target_agg_mode,
            estimator=config.reward_estimator,
            in_reward=config.in_reward,
        )

    def update(self, experience: Experience) -> tuple["KlController", Metrics]:
        """The controller for the next iteration, once per iteration; the coefficient that this one used (kl/coef) and
        the KL that is compared with the target (kl/compared). Failed samples do not count.
        """
        if not self.in_reward:
            return self, {}
        metrics = {"kl/coef": self.coef}
        if self.target is None:
            return self, metrics
        find_kl = partial(compute_token_kl, experience, self.estimator)
        kl = compute_mean_kl(find_kl, experience.mask, self.agg_mode)
        num_samples = int((~experience.failed).sum())
        coef = compute_adapted_coef(self.coef, kl, self.target, self.horizon, num_samples)
        return replace(self, coef=coef), metrics | {"kl/compared": kl}
