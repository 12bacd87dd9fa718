"""Advantage estimators: GAE (1506.02438), decoupled (2503.01491) and length-adaptive (2504.05118),
REINFORCE++ (2501.03262), RLOO (2402.14740), group-relative (2402.03300, 2508.08221).

Suffixes: B samples, T response positions. `mask_BT` (bool) marks the tokens that the policy generated; the
others are skipped, as if the sequence did not contain them. Standard deviations are those of the population
(1/n).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megarl.algo.finite import check_finite
from megarl.algo.scan import BLOCK, compute_discounted_sums
from megarl.algo.statistics import STD_EPS, compute_group_index, compute_moments
from megarl.config.schema.algo_choices import AdvantageStd, NormScope, StdOf

_CHUNK = 1 << 17
"""Entries worked on at a time: in float64 they stay in a core's cache."""


def compute_adaptive_lambda(lengths_B: Tensor, length_alpha: float, lambda_min: float) -> Tensor:
    """lambda_i = clip(1 - 1/(length_alpha * l_i), lambda_min, 1), float64 [B] (VAPO, section 4.2).

    lengths_B: int64 [B], generated tokens per response; 0 gives lambda_min.
    """
    lambdas = 1.0 - 1.0 / (length_alpha * lengths_B.double().clamp(min=1.0))
    return lambdas.clamp(min=lambda_min, max=1.0)


def compute_gae(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lambda_: float | Tensor
) -> Tensor:
    """Generalised advantage estimates [B, T] in the dtype of `values_BT`, 0 outside the mask.

    delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * lambda * A_{t+1}, over the generated
    tokens only; V after the last of them is 0. lambda_: a number, or float [B], one per sample. Computed in
    float64. Raises NonFiniteError for NaN or infinity inside the mask.
    """

    def temporal_differences(rewards: Tensor, values: Tensor) -> Tensor:
        delta = rewards - values
        delta[:, :-1].add_(values[:, 1:], alpha=gamma)
        return delta

    return _scan_generated(temporal_differences, (rewards_BT, values_BT), mask_BT, gamma, lambda_)


def compute_reward_to_go(rewards_BT: Tensor, mask_BT: Tensor, gamma: float) -> Tensor:
    """REINFORCE: A_t = sum_{k >= t} gamma^(k - t) r_k over the generated tokens, [B, T]; 0 outside the
    mask.
    """
    return _scan_generated(lambda rewards: rewards, (rewards_BT,), mask_BT, gamma, 1.0)


def _scan_generated(
    combine: Callable[..., Tensor],
    tensors: tuple[Tensor, ...],
    mask_BT: Tensor,
    gamma: float,
    lambda_: float | Tensor,
) -> Tensor:
    """Discounted sums of combine(*tensors), with the generated tokens of each row moved together first.

    Rows of like extent are worked on together, so that a short response costs its own length and not the
    batch's.
    """
    out_BT = torch.zeros_like(tensors[-1])
    decay_B = gamma * torch.as_tensor(lambda_, dtype=torch.float64, device=mask_BT.device).reshape(-1)
    for rows, width in _split_by_extent(mask_BT):
        mask = mask_BT[:, :width].index_select(0, rows)
        order = _compaction_order(mask)
        pieces = [t[:, :width].index_select(0, rows).where(mask, 0.0).double() for t in tensors]
        if order is not None:
            pieces = [piece.gather(1, order) for piece in pieces]
        sums = compute_discounted_sums(combine(*pieces), decay_B if decay_B.numel() == 1 else decay_B[rows])
        if not torch.isfinite(sums.sum()):
            for name, tensor in zip(("rewards", "values"), tensors, strict=False):
                check_finite(name, tensor, mask_BT)
            check_finite("discounted sums", sums)
        if order is not None:
            sums = torch.empty_like(sums).scatter_(1, order, sums)
        out_BT[:, :width].index_copy_(0, rows, sums.to(out_BT.dtype))
    return out_BT


def _split_by_extent(mask_BT: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Row numbers (int64) sorted by extent, and a width that holds all their generated tokens, chunk by
    chunk.
    """
    num_positions = mask_BT.shape[1]
    # Eight flags are read as one int64, several times faster than a sum over booleans.
    padding = -num_positions % 8
    padded = torch.nn.functional.pad(mask_BT, (0, padding)) if padding else mask_BT.contiguous()
    words = padded.view(torch.int64) != 0
    ends_B = (words * torch.arange(1, words.shape[1] + 1, dtype=torch.int32, device=mask_BT.device)).amax(1)
    # Widths in whole blocks spare the scan its padding.
    extents, rows = ((8 * ends_B + BLOCK - 1) // BLOCK * BLOCK).clamp(max=num_positions).sort()
    limits, start = extents.tolist(), 0
    while start < len(limits):
        stop = start + 1
        while stop < len(limits) and limits[stop] * (stop + 1 - start) <= _CHUNK:
            stop += 1
        if limits[stop - 1] > 0:
            yield rows[start:stop], limits[stop - 1]
        start = stop


def _compaction_order(mask: Tensor) -> Tensor | None:
    """int64 [B, T] putting the generated positions first, in order; None where they are first already."""
    if not bool((mask[:, 1:] > mask[:, :-1]).any()):
        return None
    return torch.argsort(~mask, dim=1, stable=True)


def compute_rloo(returns_B: Tensor, groups_B: Tensor) -> Tensor:
    """A_i = R_i - mean of the other R_j of its group, float64 [B].

    returns_B: float [B]. groups_B: int64 [B]. Raises ValueError for a group of one.
    """
    check_finite("rewards", returns_B)
    index, sizes = compute_group_index(groups_B)
    if bool((sizes < 2).any()):
        lonely = int(groups_B[(sizes[index] < 2).nonzero()[0, 0]])
        raise ValueError(f"group {lonely} holds 1 response; leave-one-out needs at least 2 per prompt")
    moments = compute_moments(returns_B, groups_B, NormScope.group)
    scale = (sizes.double() / (sizes - 1))[index]
    return torch.where(moments.constant, 0.0, (returns_B.double() - moments.mean) * scale)


def compute_group_relative(returns_B: Tensor, groups_B: Tensor, std: AdvantageStd, std_of: StdOf) -> Tensor:
    """A_i = R_i - mean of its group, over 1, the group's std (GRPO) or the batch's (LitePPO), float64 [B].

    The batch's std is of the rewards (std_of=raw) or of R - mu_g (centered). A group of equal rewards gives
    0.
    """
    check_finite("rewards", returns_B)
    group = compute_moments(returns_B, groups_B, NormScope.group)
    centered = torch.where(group.constant, 0.0, returns_B.double() - group.mean)
    if std is AdvantageStd.none:
        return centered
    if std is AdvantageStd.group:
        return centered / (group.std + STD_EPS)
    batch = compute_moments(centered if std_of is StdOf.centered else returns_B, groups_B, NormScope.batch)
    return centered / (batch.std + STD_EPS)


def compute_whitened(advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(A - mean) / (std + 1e-6) over all generated tokens, [B, T]; 0 outside the mask and where all are
    equal.
    """
    inside = advantages_BT[mask_BT]
    check_finite("advantages", inside)
    if inside.numel() == 0:
        return torch.zeros_like(advantages_BT)
    moments = compute_moments(inside, torch.zeros_like(inside, dtype=torch.int64), NormScope.batch)
    whitened = (inside.double() - moments.mean) / (moments.std + STD_EPS)
    whitened = torch.where(moments.constant, 0.0, whitened).to(advantages_BT.dtype)
    return torch.zeros_like(advantages_BT).masked_scatter(mask_BT, whitened)
