"""Context parallelism over packed sequences: which rank has which tokens, and what the ranks need of each other.

Each sequence is cut into 2 * cp equal chunks (it is padded so that they are equal); rank r has chunks r and
2 * cp - 1 - r, so that the ranks have the same share of causal attention. This is the layout of Transformer
Engine's packed (thd) attention; on other machines the keys and values of all ranks are gathered.

Shapes: S packed tokens of all ranks, s = S / cp those of one, R response tokens, H query heads, K key heads,
D size of a head, n sequences of a rectangle, L its width.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn import functional as F

from megarl.mcore.cpu.segments import Rectangle, ToCells, build_rectangle, to_rows, to_tokens


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


@dataclass(frozen=True)
class AttentionShare:
    """What the local attention of one rank needs of a micro-batch."""

    order: Tensor
    """int64 [S]: place of each packed token in the gathered [cp * s]"""
    inverse: Tensor
    """int64 [cp * s]: packed token in each place"""
    queries: tuple[Rectangle, ...]
    """This rank's tokens of each rectangle of sequences"""
    masks: tuple[Tensor, ...]
    """bool [n, 1, L / cp, L]: the keys that each of them sees"""
    context: ContextGroup


def find_owners(positions: Tensor, lengths: Tensor, size: int) -> Tensor:
    """int64 [S]: the rank that has each token, from its position in its sequence and the sequence's length."""
    chunk = positions // (lengths // (2 * size))
    return torch.minimum(chunk, 2 * size - 1 - chunk)


def _spread(owners: Tensor, size: int) -> tuple[Tensor, int]:
    """Place of each element in [size * width], each rank's in their order; and the width."""
    counts = torch.stack([(owners == rank).cumsum(0) for rank in range(size)])
    index = counts.gather(0, owners[None]).squeeze(0) - 1
    width = int(counts[:, -1].max()) if owners.numel() else 0
    return owners * width + index, width


def share_responses(owners: Tensor, context: ContextGroup, device: torch.device) -> ResponseShare:
    """owners: int64 [R], the rank that has the predictor of each response token."""
    order, width = _spread(owners, context.size)
    mine = (owners == context.rank).nonzero().squeeze(1)
    return ResponseShare(mine.to(device), order.to(device), width, context)


def share_attention(
    rectangles: tuple[Rectangle, ...],
    lengths: Tensor,
    positions: Tensor,
    owners: Tensor,
    context: ContextGroup,
    device: torch.device,
) -> AttentionShare:
    """rectangles: those of whole sequences; lengths: int64, theirs; positions, owners: int64 [S]."""
    order, _ = _spread(owners, context.size)
    sizes = [rectangle.num_rows for rectangle in rectangles]
    mine = positions[owners == context.rank]
    queries, masks = [], []
    for rectangle, rows in zip(rectangles, lengths.split(sizes), strict=True):  # type: ignore[no-untyped-call]
        query = build_rectangle(rows // context.size)
        own, mine = mine[: query.num_tokens], mine[query.num_tokens :]
        places = (own if query.source is None else own[query.source]).view(query.num_rows, query.width)
        queries.append(query.to(device))
        masks.append((places[:, None, :, None] >= torch.arange(rectangle.width)).to(device))
    return AttentionShare(order.to(device), order.argsort().to(device), tuple(queries), tuple(masks), context)


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


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rectangles: tuple[Rectangle, ...],
    share: AttentionShare,
    scale: float,
) -> Tensor:
    """query [s, H, D], key and value [s, K, D] of this rank -> [s, H * D]; gradients of keys and values are summed
    over the ranks.
    """
    joined = torch.cat([key, value], -1).contiguous()
    gathered = gather_from_sequence_parallel_region(joined, group=share.context.group)
    packed: Tensor = ToCells.apply(gathered, share.order, share.inverse)  # type: ignore[no-untyped-call]
    pieces = zip(
        rectangles,
        share.queries,
        share.masks,
        query.split([rectangle.num_tokens for rectangle in share.queries]),  # type: ignore[no-untyped-call]
        packed.split([rectangle.num_tokens for rectangle in rectangles]),  # type: ignore[no-untyped-call]
        strict=True,
    )
    parts = []
    for whole, own, mask, queries, pairs in pieces:
        keys, values = to_rows(pairs, whole).chunk(2, -1)
        grouped = query.shape[1] != key.shape[1]
        rows = F.scaled_dot_product_attention(
            to_rows(queries, own), keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped
        )
        parts.append(to_tokens(rows, own))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
