"""What the loss functions work on: one micro-batch's tokens, the global minibatch's counts, and the result.

Suffix: R response tokens of a micro-batch, flat.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megarl.algo.finite import check_finite
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
