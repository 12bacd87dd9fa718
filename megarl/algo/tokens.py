"""What the loss functions work on: one micro-batch's tokens, the global minibatch's counts, and the result.

Suffix: R response tokens of a micro-batch, flat.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megarl.algo.blocks import check_finite
from megarl.config.schema.algo import MismatchConfig, MismatchCorrection, RatioLevel
from megarl.types import TrainingSamples


@dataclass(frozen=True)
class TokenTargets:
    """One micro-batch: every response position of its rows, generated or not. A row is never split."""

    rows: Tensor
    """int64 [R], sample index in the micro-batch, 0..num_rows-1"""
    num_rows: int
    row_lengths: Tensor
    """int64 [num_rows], generated tokens per sample"""
    mask: Tensor
    """bool [R]"""
    loss_mask: Tensor
    """bool [R]"""
    positive: Tensor
    """bool [R]: the token's sample is correct"""
    advantages: Tensor
    """float [R]"""
    old_logprobs: Tensor | None
    """float [R]; None: the log-probs of the policy being trained, detached"""
    rollout_logprobs: Tensor
    """float [R]"""
    sampling_logprobs: Tensor | None
    """float [R]"""
    ref_logprobs: Tensor | None
    """float [R]"""
    old_values: Tensor | None
    """float [R]"""
    returns: Tensor | None
    """float [R]"""
    critic_mask: Tensor | None = None
    """bool [R]; None: that of `mask`"""

    def require(self, name: str, tensor: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The tensor (float [R]) in this dtype with 0 where not generated.

        Raises ValueError naming it where it is None, NonFiniteError for NaN or infinity at generated tokens.
        """
        if tensor is None:
            raise ValueError(f"{name}: none found, but the configured loss needs it; must be float [{len(self.rows)}]")
        check_finite(name, tensor.detach(), self.mask, self.rows)
        return torch.where(self.mask, tensor, 0.0).to(dtype)


@dataclass(frozen=True)
class PolicyTokens:
    """One micro-batch for the policy's loss, its positions that the policy did not generate replaced by 0.

    All float [R] in the dtype of the log-probs.
    """

    logprobs: Tensor
    """of the policy being trained, differentiable"""
    log_ratio: Tensor
    """logprobs - old_logprobs, differentiable"""
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    targets: TokenTargets
    entropy: Tensor | None = None
    """as the model gave it, not replaced: read it through `require`"""
    full_kl: Tensor | None = None
    """as the model gave it, not replaced: read it through `require`"""

    def require(self, name: str, tensor: Tensor | None) -> Tensor:
        """As `TokenTargets.require`, in the dtype of the log-probs."""
        return self.targets.require(name, tensor, self.logprobs.dtype)


@dataclass(frozen=True)
class LossCounts:
    """Counts over the global minibatch: what the sums are divided by."""

    num_tokens: int
    """with a policy loss"""
    num_sequences: int
    """with a policy loss in at least one token"""
    num_positive_tokens: int
    """of correct samples, with a policy loss"""
    num_critic_tokens: int
    """generated, and not too stale"""
    num_critic_sequences: int
    """with at least one such token"""
    num_negative_tokens: int
    """with a policy loss and a negative advantage"""


@dataclass(frozen=True)
class LossOutput:
    """One micro-batch's contribution."""

    loss: Tensor
    """scalar, differentiable; the minibatch's loss is the sum over its micro-batches and data-parallel ranks"""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """detached scalars, already divided: their sum over micro-batches and ranks is the metric"""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """detached scalars, combined by max"""
    old_logprobs: Tensor | None = None
    """float [R], detached: of the policy's loss whose targets have none"""


def count_minibatch(samples: TrainingSamples, rows: Tensor | None = None) -> LossCounts:
    """The counts of one global minibatch (all data-parallel ranks' rows). rows: int64, its samples; None: all."""
    critic = samples.mask if samples.critic_mask is None else samples.critic_mask
    whole = (samples.loss_mask, critic, samples.positive, samples.advantages)
    loss_mask, critic_mask, positive, advantages = whole if rows is None else (each[rows] for each in whole)
    return LossCounts(
        num_tokens=int(loss_mask.sum()),
        num_sequences=int(loss_mask.any(1).sum()),
        num_positive_tokens=int((loss_mask & positive[:, None]).sum()),
        num_critic_tokens=int(critic_mask.sum()),
        num_critic_sequences=int(critic_mask.any(1).sum()),
        num_negative_tokens=int((loss_mask & (advantages < 0)).sum()),
    )


# Training engine against rollout engine: the same weights score the same tokens differently.
#
# Ratio exp(old_logprobs - rollout_logprobs) as a weight of the policy loss, per token, per sequence, or as the
# geometric mean over a sequence: truncated from above (TIS, https://fengyao.notion.site/off-policy-rl) or 0 outside its
# bounds (masked: MIS, IcePop 2510.18855).
#
# Suffix: R flat response tokens of one micro-batch or batch; `rows` (int64 [R]) gives each one's sample.


def compute_log_ratio(log_ratio_R: Tensor, rows: Tensor, row_lengths: Tensor, level: RatioLevel) -> Tensor:
    """Log of the ratio of two policies at the given level, for each token, float [R].

    log_ratio_R: the difference of the tokens' log-probs, 0 where not generated. row_lengths: int64, generated tokens
    per row.
    """
    if level is RatioLevel.token:
        return log_ratio_R
    zeros = torch.zeros(row_lengths.shape, dtype=log_ratio_R.dtype, device=log_ratio_R.device)
    total = zeros.index_add(0, rows, log_ratio_R)
    if level is RatioLevel.geometric:
        total = total / row_lengths.clamp(min=1)
    return total[rows]


def compute_outside(log_ratio_R: Tensor, config: MismatchConfig) -> Tensor:
    """bool [R]: the ratio is outside [low, high]."""
    low = math.log(config.low) if config.low > 0 else -math.inf
    return (log_ratio_R < low) | (log_ratio_R > math.log(config.high))


def compute_mismatch_weight(log_ratio_R: Tensor, config: MismatchConfig) -> Tensor:
    """c: min(ratio, high), or the ratio inside [low, high] and 0 outside, float [R]. No gradient flows through it.

    tis has no lower bound: what the training engine holds for unlikely stays unlikely.
    """
    # Clamped in log space: the exponential of a long sequence's ratio overflows.
    truncated = log_ratio_R.detach().clamp(max=math.log(config.high)).exp()
    if config.correction is MismatchCorrection.tis:
        return truncated
    return torch.where(compute_outside(log_ratio_R, config), 0.0, truncated)
