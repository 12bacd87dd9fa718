"""Context parallelism over packed sequences: which rank has which tokens, and what the ranks need of each other.

Each sequence is cut into 2 * cp equal chunks (it is padded so that they are equal); rank r has chunks r and
2 * cp - 1 - r, so that the ranks have the same share of causal attention. This is the layout of Transformer
Engine's packed (thd) attention.

Shapes: S packed tokens of all ranks, R response tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share the tokens of each sequence; by default this rank alone."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None


ALONE = ContextGroup()


@dataclass(frozen=True)
class ResponseShare:
    """Whose rank computes what of the R response tokens of a micro-batch."""

    mine: Tensor
    """int64 [this rank's]: which of the R"""
    order: Tensor
    """int64 [R]: place of each in what all ranks computed, [size * width]"""
    width: int
    """Most tokens of a rank"""
    context: ContextGroup


def find_owners(positions: Tensor, lengths: Tensor, size: int) -> Tensor:
    """int64 [S]: the rank that has each token, from its position in its sequence and the sequence's length."""
    chunk = positions // (lengths // (2 * size))
    return torch.minimum(chunk, 2 * size - 1 - chunk)


def spread(owners: Tensor, size: int) -> tuple[Tensor, int]:
    """Place of each element in [size * width], each rank's in their order; and the width."""
    counts = torch.stack([(owners == rank).cumsum(0) for rank in range(size)])
    index = counts.gather(0, owners[None]).squeeze(0) - 1
    width = int(counts[:, -1].max()) if owners.numel() else 0
    return owners * width + index, width


def share_responses(owners: Tensor, context: ContextGroup, device: torch.device) -> ResponseShare:
    """owners: int64 [R], the rank that has the predictor of each response token."""
    order, width = spread(owners, context.size)
    mine = (owners == context.rank).nonzero().squeeze(1)
    return ResponseShare(mine.to(device), order.to(device), width, context)


class _GatherResponses(torch.autograd.Function):
    """Every rank computes the same function of the gathered numbers: each takes its own part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: ResponseShare) -> Tensor:
        ctx.mine = share.mine
        padded = F.pad(x, (0, share.width - x.numel()))
        gathered = padded.new_empty(share.context.size * share.width)
        dist.all_gather_into_tensor(gathered, padded, group=share.context.group)
        return gathered.index_select(0, share.order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.mine), None


def gather_responses(x: Tensor, share: ResponseShare | None) -> Tensor:
    """This rank's numbers -> those of all R response tokens, on every rank of the context-parallel group."""
    if share is None or share.width == 0:
        return x
    gathered: Tensor = _GatherResponses.apply(x, share)  # type: ignore[no-untyped-call]
    return gathered
