"""Packed micro-batches: rows of `Sequences` laid end to end, and which rank has which of their tokens.

Under context parallelism each sequence is padded and cut into 2 * cp equal chunks, of which rank r has r and
2 * cp - 1 - r, as in Transformer Engine's packed (thd) attention: all have the same share of causal attention.

Shapes: K rows of the micro-batch, S packed tokens of all ranks, R response tokens, T padded response positions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn import functional as F

from megarl.mcore.device import device, send
from megarl.mcore.layers import find_layers
from megarl.types import Sequences


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


class _GatherResponses(torch.autograd.Function):
    """Every rank computes the same function of the gathered numbers: each takes its own part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: ResponseShare) -> Tensor:
        ctx.mine = share.mine
        padded = F.pad(x, (*(0, 0) * (x.dim() - 1), 0, share.width - len(x)))
        gathered = padded.new_empty((share.context.size * share.width, *x.shape[1:]))
        dist.all_gather_into_tensor(gathered, padded, group=share.context.group)
        return gathered.index_select(0, share.order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.mine), None


@dataclass
class PackedParams(PackedSeqParams):  # type: ignore[misc]
    """Megatron's packing parameters and what the layers and the head need besides."""

    positions: Tensor | None = None
    """int64 [this rank's S]: position of each token in its own sequence"""
    attention: Any = None
    """What `Layers.plan_attention` gave"""
    predictors: Tensor | None = None
    """int64 [R]: packed position whose output predicts each response token, of those whose predictor this rank has"""
    sequence_numbers: Tensor | None = None
    """int64 [S]: number of each token's sequence in cu_seqlens_q; -1: padding"""
    routed_experts: Tensor | None = None
    """[S, layers, experts of a token], as in `Sequences`; 0 for padding. None: routers choose themselves"""


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch on the device. Response tokens are flat, in packed order.

    Under context parallelism S are this rank's tokens; R are all, on every rank of its group.
    """

    tokens: Tensor
    """int64 [1, S]"""
    positions: Tensor
    """int64 [1, S]: position of each token in its own sequence"""
    params: PackedParams
    targets: Tensor
    """int64 [R]: the response tokens"""
    rows: Tensor
    """int64 [K]: number of each row in the sequences it was taken from; longest first; on the CPU"""
    token_rows: Tensor
    """int64 [R]: place in `rows` of the sample to which a response token belongs; on the CPU"""
    columns: Tensor
    """int64 [R]: its position in the response; on the CPU"""
    share: ResponseShare | None
    """Whose rank predicts which of the R; None: this rank all of them"""

    @property
    def num_rows(self) -> int:
        return self.rows.numel()

    @property
    def own_targets(self) -> Tensor:
        """int64: the response tokens that this rank predicts."""
        return self.targets if self.share is None else self.targets[self.share.mine]

    def gather(self, x: Tensor) -> Tensor:
        """What this rank computed of `own_targets` -> that of all R; differentiable."""
        if self.share is None or self.share.width == 0:
            return x
        gathered: Tensor = _GatherResponses.apply(x, self.share)  # type: ignore[no-untyped-call]
        return gathered

    def flatten(self, padded: Tensor) -> Tensor:
        """[B, T] of all sequences -> [R] on the device."""
        return send(padded[self.rows[self.token_rows], self.columns])


def pad_lengths(lengths: Tensor, num_ranks: int) -> Tensor:
    """Tokens of sequences that so many context-parallel ranks share."""
    unit = 1 if num_ranks == 1 else 2 * num_ranks
    return (lengths + unit - 1) // unit * unit


def find_length(sizes: Tensor, multiple: int, num_ranks: int) -> int:
    """S of all context-parallel ranks, of which each has a multiple of `multiple`, for sequences of these sizes."""
    whole = math.lcm(1 if num_ranks == 1 else 2 * num_ranks, multiple * num_ranks)
    return -(-max(1, int(sizes.sum())) // whole) * whole


MOST_PADDING = 0.1
"""Of the tokens of a call under pipeline parallelism, to give all of its micro-batches one length"""


def choose_length(sequences: Sequences, shares: Sequence[Sequence[int]], multiple: int, num_ranks: int) -> int:
    """The S of a rank that all micro-batches are to have; 0: each its own, where padding would take too much.

    With one length no stage of a pipeline tells the next one the shape of what it sends, for which the next would wait
    for its GPU before each micro-batch.
    """
    sizes = [find_length(pad_lengths(sequences.lengths[list(rows)], num_ranks), multiple, num_ranks) for rows in shares]
    longest = max(sizes)
    return longest // num_ranks if longest * len(sizes) - sum(sizes) <= MOST_PADDING * sum(sizes) else 0


def build_batch(
    sequences: Sequences, rows: Sequence[int], multiple: int = 1, context: ContextGroup = ALONE, least: int = 0
) -> PackedBatch:
    """Pack the given rows; this rank's S is padded to a multiple of `multiple`, and to `least`, with a sequence of its
    own. No rows give padding alone, for a rank that must take part without data.

    Under context parallelism the batch holds this rank's tokens and the predictors among them; its targets are all R.
    Raises ValueError for a sequence that is not held, or has no prompt token to predict its first response token.
    """
    picked = torch.tensor(sorted(rows, key=lambda row: (-int(sequences.lengths[row]), row)), dtype=torch.int64)
    if sequences.held is not None and not bool(sequences.held[picked].all()):
        missing = int(picked[~sequences.held[picked]][0])
        raise ValueError(f"row {missing} was not sent to this rank, which computes it")
    starts = (sequences.lengths.cumsum(0) - sequences.lengths)[picked]
    lengths, prompts = sequences.lengths[picked], sequences.prompt_lengths[picked]
    if bool((prompts < 1).any()):
        raise ValueError(f"row {int(picked[prompts < 1][0])} has no prompt token")
    # Tokens of each packed sequence; one more than `lengths` where the sum needs padding.
    sizes = pad_lengths(lengths, context.size)
    total = int(sizes.sum())
    if padding := max(least * context.size, find_length(sizes, multiple, context.size)) - total:
        sizes = torch.cat([sizes, torch.tensor([padding])])
    # Of each of the S packed tokens of all ranks: the number of its sequence, its position there, whether it is one.
    numbers = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    positions = torch.arange(len(numbers)) - (sizes.cumsum(0) - sizes)[numbers]
    starts, lengths, prompts = (F.pad(x, (0, len(sizes) - len(x)))[numbers] for x in (starts, lengths, prompts))
    exists = positions < lengths

    def place(values: Tensor) -> Tensor:
        """What `values` has for each token of the sequences -> for each packed one, 0 for padding."""
        placed = values.new_zeros((len(exists), *values.shape[1:]))
        placed[exists] = values[(starts + positions)[exists]]
        return placed

    tokens, experts = place(sequences.tokens), sequences.routed_experts
    experts = None if experts is None else place(experts)
    response = (exists & (positions >= prompts)).nonzero().squeeze(1)
    flat = {
        "targets": send(tokens[response]),
        "rows": picked,
        "token_rows": numbers[response],
        "columns": (positions - prompts)[response],
    }
    predictors, owned = response - 1, torch.where(exists, numbers, -1)
    if context.size == 1:
        attention = find_layers().plan_attention(sizes, device())
        params = _build_params(sizes, positions, attention, predictors, owned, experts)
        return PackedBatch(send(tokens[None]), send(positions[None]), params, share=None, **flat)
    owners = find_owners(positions, sizes[numbers], context.size)
    mine = owners == context.rank
    places, width = spread(owners[predictors], context.size)
    own = (owners[predictors] == context.rank).nonzero().squeeze(1)
    share = ResponseShare(send(own), send(places), width, context)
    predictors = (mine.cumsum(0) - 1)[predictors][own]
    order, _ = spread(owners, context.size)
    attention = find_layers().share_attention(sizes, device(), positions, mine, order, context.size, context.group)
    experts = None if experts is None else experts[mine]
    params = _build_params(sizes, positions[mine], attention, predictors, owned[mine], experts)
    return PackedBatch(send(tokens[mine][None]), send(positions[mine][None]), params, share=share, **flat)


def _build_params(
    sizes: Tensor, positions: Tensor, attention: Any, predictors: Tensor, numbers: Tensor, experts: Tensor | None
) -> PackedParams:
    """sizes, attention: of all context-parallel ranks; the others: of this one."""
    cu_seqlens = send(F.pad(sizes.cumsum(0), (1, 0)).to(torch.int32))
    # As many rotary angles are made, of which Megatron keeps 32 sizes on the device.
    longest = int(sizes.max())
    longest += -longest % find_layers().length_multiple
    return PackedParams(
        qkv_format=find_layers().qkv_format,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        positions=send(positions),
        attention=attention,
        predictors=send(predictors),
        sequence_numbers=send(numbers),
        routed_experts=None if experts is None else send(experts),
    )
