"""Packed micro-batches: rows of `Sequences` laid end to end, and which rank has which of their tokens.

Under context parallelism each sequence is padded and cut into 2 * cp equal chunks, of which rank r has r and
2 * cp - 1 - r, as in Transformer Engine's packed (thd) attention: all have the same share of causal attention.

Shapes: K rows of the micro-batch, S packed tokens of all ranks, R response tokens, T padded response positions.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn import functional as F

from megarl.mcore.device import device
from megarl.mcore.layers import find_layers
from megarl.mcore.spec import Role, WorkerSpec
from megarl.models.architecture import Architecture
from megarl.types import Metrics, Sequences


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
        padded = F.pad(x, (0, share.width - x.numel()))
        gathered = padded.new_empty(share.context.size * share.width)
        dist.all_gather_into_tensor(gathered, padded, group=share.context.group)
        return gathered.index_select(0, share.order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.mine), None


@dataclass
class PackedParams(PackedSeqParams):  # type: ignore[misc]
    """Megatron's packing parameters and what the layers and the head need besides."""

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
        return padded[self.rows[self.token_rows], self.columns].to(self.targets.device)


def build_batch(sequences: Sequences, rows: list[int], multiple: int = 1, context: ContextGroup = ALONE) -> PackedBatch:
    """Pack the given rows; this rank's S is padded to a multiple of `multiple` with a sequence of its own. No rows give
    padding alone, for a rank that must take part without data.

    Under context parallelism the batch holds this rank's tokens and the predictors among them; its targets are all R.
    Raises ValueError for a sequence that is not held, or has no prompt token to predict its first response token.
    """
    picked = _pick(sequences, rows)
    starts = (sequences.lengths.cumsum(0) - sequences.lengths)[picked]
    lengths, prompts = sequences.lengths[picked], sequences.prompt_lengths[picked]
    sizes = _pad_sizes(lengths, multiple, context.size)
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
        "targets": tokens[response].to(device()),
        "rows": picked,
        "token_rows": numbers[response],
        "columns": (positions - prompts)[response],
    }
    predictors, owned = response - 1, torch.where(exists, numbers, -1)
    if context.size == 1:
        attention = find_layers().plan_attention(sizes, device())
        params = _build_params(sizes, attention, predictors, owned, experts)
        return PackedBatch(tokens[None].to(device()), positions[None].to(device()), params, share=None, **flat)
    owners = find_owners(positions, sizes[numbers], context.size)
    mine = owners == context.rank
    places, width = spread(owners[predictors], context.size)
    own = (owners[predictors] == context.rank).nonzero().squeeze(1)
    share = ResponseShare(own.to(device()), places.to(device()), width, context)
    predictors = (mine.cumsum(0) - 1)[predictors][own]
    order, _ = spread(owners, context.size)
    attention = find_layers().share_attention(sizes, device(), positions, mine, order, context.size, context.group)
    params = _build_params(sizes, attention, predictors, owned[mine], None if experts is None else experts[mine])
    return PackedBatch(tokens[mine][None].to(device()), positions[mine][None].to(device()), params, share=share, **flat)


def _pick(sequences: Sequences, rows: list[int]) -> Tensor:
    """int64: the rows, longest first."""
    picked = torch.tensor(sorted(rows, key=lambda row: (-int(sequences.lengths[row]), row)), dtype=torch.int64)
    prompts, held = sequences.prompt_lengths[picked], sequences.held
    if held is not None and not bool(held[picked].all()):
        raise ValueError(f"row {int(picked[~held[picked]][0])} was not sent to this rank, which computes it")
    if bool((prompts < 1).any()):
        raise ValueError(f"row {int(picked[prompts < 1][0])} has no prompt token")
    return picked


def _pad_sizes(lengths: Tensor, multiple: int, cp: int) -> Tensor:
    """int64: tokens of each packed sequence; one more than `lengths` where the sum needs padding."""
    unit = 1 if cp == 1 else 2 * cp
    sizes = (lengths + unit - 1) // unit * unit
    whole, total = math.lcm(unit, multiple * cp), int(sizes.sum())
    padding = -total % whole if total else whole
    return torch.cat([sizes, torch.tensor([padding])]) if padding else sizes


def _build_params(
    sizes: Tensor, attention: Any, predictors: Tensor, numbers: Tensor, experts: Tensor | None
) -> PackedParams:
    """sizes, attention: of all context-parallel ranks; the others: of this one."""
    cu_seqlens = F.pad(sizes.cumsum(0), (1, 0)).to(torch.int32).to(device())
    return PackedParams(
        qkv_format=find_layers().qkv_format,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        # As many rotary angles are made.
        max_seqlen_q=int(sizes.max()),
        max_seqlen_kv=int(sizes.max()),
        attention=attention,
        predictors=predictors.to(device()),
        sequence_numbers=numbers.to(device()),
        routed_experts=None if experts is None else experts.to(device()),
    )


def pack(
    lengths: Sequence[int], tokens_per_microbatch: int, num_ranks: int, costs: Sequence[float] | None = None
) -> list[list[list[int]]]:
    """Rank -> micro-batch -> row numbers; each row is in exactly one micro-batch.

    lengths: tokens of each row. costs: compute of each row, in any unit; without it, the lengths. Ranks, and the
    micro-batches of a rank, are balanced by cost: costliest row first, to what has cost least so far (Graham's LPT: no
    rank costs more than 4/3 - 1/(3 num_ranks) times the best assignment). Every rank gets as many micro-batches, the
    fewest that the greedy rule finds, its costliest first; some may be empty. None of more than one row has more than
    `tokens_per_microbatch` tokens. A pure function: the same on every rank.
    """
    costs = lengths if costs is None else costs
    order = sorted(range(len(lengths)), key=lambda row: (-costs[row], -lengths[row], row))
    shares = _assign(order, costs, num_ranks)
    num_microbatches = max(_fewest([lengths[row] for row in share], tokens_per_microbatch) for share in shares)
    while True:
        ranks = [_fill(share, lengths, costs, tokens_per_microbatch, num_microbatches) for share in shares]
        filled = [microbatches for microbatches in ranks if microbatches is not None]
        if len(filled) == num_ranks:
            return filled
        num_microbatches += 1


def _assign(order: Sequence[int], costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Give each row in turn to the rank that has cost least so far."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    heap = [(0.0, rank) for rank in range(num_ranks)]
    for row in order:
        cost, rank = heap[0]
        shares[rank].append(row)
        heapq.heapreplace(heap, (cost + costs[row], rank))
    return shares


def _fewest(lengths: Sequence[int], budget: int) -> int:
    """A number of micro-batches below which no assignment fits, 1 at least."""
    # A row over the budget is alone; no two of the others longer than half of it share a micro-batch.
    others = [length for length in lengths if length <= budget]
    num_long = sum(2 * length > budget for length in others)
    return max(1, len(lengths) - len(others) + max(num_long, -(-sum(others) // budget)))


def _fill(
    order: Sequence[int], lengths: Sequence[int], costs: Sequence[float], budget: int, num_bins: int
) -> list[list[int]] | None:
    """Give each row in turn to the bin with room that has cost least so far; costliest bin first. None: no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    tokens, totals = [0] * num_bins, [0.0] * num_bins
    heap = [(0.0, number) for number in range(num_bins)]
    for row in order:
        full = []
        while heap and bins[heap[0][1]] and tokens[heap[0][1]] + lengths[row] > budget:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        number = heap[0][1]
        bins[number].append(row)
        tokens[number] += lengths[row]
        totals[number] += costs[row]
        heapq.heapreplace(heap, (totals[number], number))
        for entry in full:
            heapq.heappush(heap, entry)
    return [bins[number] for number in sorted(range(num_bins), key=lambda number: (-totals[number], number))]


REAL, COMPUTED = "tokens/real", "tokens/computed"


def plan_microbatches(
    spec: WorkerSpec, arch: Architecture, sequences: Sequences, num_ranks: int
) -> list[list[list[int]]]:
    """Data-parallel rank -> micro-batch -> row numbers, as `pack` finds them; tokens may be missing in `sequences`."""
    costs = compute_row_costs(arch, sequences, with_value_head=spec.role is Role.critic)
    return pack(sequences.lengths.tolist(), spec.tokens_per_microbatch * spec.parallel.cp, num_ranks, costs)


def compute_row_costs(arch: Architecture, sequences: Sequences, with_value_head: bool = False) -> list[float]:
    """Multiply-adds of one forward pass, for each row.

    A sequence of L tokens of which R are the response, with d the size of a head, H query and K key-value heads,
    h the hidden size, f the width of a layer's MLP (of a token's experts together) and V the vocabulary: the sum over
    the layers of L * (2 h d (H + K) + 3 h f) + L^2 * H d, and R * h V; the value head's R * h in place of the last.
    Causal attention counts L^2 / 2 for the scores and as many for their product with the values.
    """
    per_token, per_square = count_layer_work(arch)
    per_response_token = arch.hidden_size * (1 if with_value_head else arch.vocab_size)
    return [
        float(length * per_token + length**2 * per_square + response * per_response_token)
        for length, response in zip(sequences.lengths.tolist(), sequences.response_lengths.tolist(), strict=True)
    ]


def count_layer_work(arch: Architecture) -> tuple[int, int]:
    """Multiply-adds of all layers for each token, and for each token times the tokens of its sequence."""
    h, heads = arch.hidden_size, arch.num_heads * arch.head_size
    rows = 3 * arch.ffn_size * (arch.num_layers - arch.num_expert_layers)
    if arch.experts is not None:
        ffn_size = arch.experts.top_k * arch.experts.ffn_size + arch.experts.shared_ffn_size
        rows += arch.num_expert_layers * (3 * ffn_size + arch.experts.num_experts)
    per_token = arch.num_layers * 2 * h * (heads + arch.num_kv_heads * arch.head_size) + h * rows
    return per_token, arch.num_layers * heads


def count_tokens(batch: "PackedBatch", sequences: Sequences) -> dict[str, Tensor]:
    """Tokens of a micro-batch of `sequences` and those that its ranks compute, padding included, as metrics' sums."""
    return {REAL: sequences.lengths[batch.rows].sum(), COMPUTED: batch.params.cu_seqlens_q[-1]}


def describe_work(metrics: Metrics, spec: WorkerSpec, arch: Architecture, sequences: Sequences) -> Metrics:
    """The metrics of an optimizer step with two in place of the counts of tokens.

    ROLE/real_tokens_frac: real tokens / computed ones. ROLE/model_tflop_sum: 1e12 floating-point operations of a
    forward pass and of a backward pass of twice as many, without what is computed again; with adapters, whose own are
    not counted, without the products for the gradients of the frozen weights.
    """
    role = spec.role
    rest = {key: value for key, value in metrics.items() if not key.startswith("tokens/")}
    multiply_adds = sum(compute_row_costs(arch, sequences, with_value_head=role is Role.critic))
    operations = 6 * multiply_adds
    if spec.lora is not None:
        _, per_square = count_layer_work(arch)
        operations -= 2 * (multiply_adds - per_square * float(sequences.lengths.double().square().sum()))
    return {
        **rest,
        f"{role.value}/real_tokens_frac": metrics[REAL] / metrics[COMPUTED],
        f"{role.value}/model_tflop_sum": 1e-12 * operations,
    }
