"""Packed micro-batches: rows of `Sequences` laid end to end.

Shapes: K rows of the micro-batch, S packed tokens, R response tokens, T response positions of the padded
tensors.
"""

import math
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn import functional as F

from megarl.mcore.cpu.segments import Rectangle, plan_rectangles, plan_responses
from megarl.mcore.device import device
from megarl.mcore.microbatches import group_rows
from megarl.mcore.model.context_parallel import (
    ALONE,
    AttentionShare,
    ContextGroup,
    ResponseShare,
    find_owners,
    gather_responses,
    share_attention,
    share_responses,
)
from megarl.mcore.model.layer_spec import uses_transformer_engine
from megarl.types import Sequences


@dataclass
class PackedParams(PackedSeqParams):  # type: ignore[misc]
    """Megatron's packing parameters and what the local attention and the head need besides."""

    rectangles: tuple[Rectangle, ...] = ()
    predictors: Tensor | None = None
    """int64 [R]: packed position whose output predicts each response token; under context parallelism of those
    whose predictor this rank has
    """
    sequence_numbers: Tensor | None = None
    """int64 [S]: number of each token's sequence in cu_seqlens_q; -1: padding"""
    routed_experts: Tensor | None = None
    """[S, layers, experts of a token], as in `Sequences`; 0 for padding. None: routers choose themselves"""
    attention_share: AttentionShare | None = None
    """None: this rank has all tokens of its sequences, or Transformer Engine does with its own"""


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
    left_out: Tensor
    """int64: lengths of prompts, one for each row that has its prompt's tokens together with an earlier row"""
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
        return gather_responses(x, self.share)

    def flatten(self, padded: Tensor) -> Tensor:
        """[B, T] of all sequences -> [R] on the device."""
        return padded[self.rows[self.token_rows], self.columns].to(self.targets.device)


@dataclass(frozen=True)
class Segments:
    """The n packed sequences of a micro-batch, int64 [n] each: whole rows and shared prompts, then the responses to
    these.
    """

    starts: Tensor
    """Place of the first token in `Sequences.tokens`"""
    lengths: Tensor
    rows: Tensor
    """Place in `PackedBatch.rows` of the row whose tokens they are; of a shared prompt the first of its rows"""
    offsets: Tensor
    """Position of the first token in the row: above 0 for a response to a shared prompt"""
    prompt_lengths: Tensor
    """Tokens that are a prompt's"""
    prompts: Tensor
    """The segment of the prompt of a response; -1: it has its own"""
    left_out: Tensor
    """As in `PackedBatch`; of any number"""


@dataclass(frozen=True)
class Layout:
    """Where the S packed tokens of all ranks are, int64 [S] where nothing else is said."""

    sizes: Tensor
    """int64 [n or n + 1]: tokens of each packed sequence, padding included"""
    firsts: Tensor
    """int64, of the same shape: the first token of each"""
    segment_of: Tensor
    positions: Tensor
    exists: Tensor
    """bool [S]: it is no padding"""
    sources: Tensor
    """Place in `Sequences.tokens` of each that exists"""
    response: Tensor
    """int64 [R]: the response tokens"""
    predictors: Tensor
    """int64 [R]: the token whose output predicts each of them"""


def build_batch(
    sequences: Sequences,
    rows: list[int],
    multiple: int = 1,
    context: ContextGroup = ALONE,
    share_prompts: bool = False,
) -> PackedBatch:
    """Pack the given rows; this rank's S is padded to a multiple of `multiple` with a sequence of its own.

    Under context parallelism each sequence is padded to a multiple of 2 * cp, and the batch holds this rank's tokens
    and the predictors that are among them; its targets are all R. share_prompts, without it: rows of the same prompt
    have its tokens once.
    No rows give a batch of padding only, for a rank that must take part without data.
    Raises ValueError for a sequence that is not held, and for one without a prompt token: nothing would predict its
    first response token.
    """
    picked = _pick(sequences, rows)
    segments = _cut_segments(sequences, picked, share_prompts)
    laid = _lay_out(segments, _pad_sizes(segments.lengths, multiple, context.size))
    tokens = _place(sequences.tokens, laid)
    experts = None if sequences.routed_experts is None else _place(sequences.routed_experts, laid)
    rows_of = segments.rows[laid.segment_of[laid.response]]
    flat = {
        "targets": tokens[laid.response].to(device()),
        "rows": picked,
        "token_rows": rows_of,
        "columns": laid.positions[laid.response] - sequences.prompt_lengths[picked][rows_of],
        "left_out": segments.left_out,
    }
    positions, predictors, numbers = laid.positions, laid.predictors, torch.where(laid.exists, laid.segment_of, -1)
    rectangles = _plan_rectangles(segments, laid)
    if context.size == 1:
        params = _build_params(laid, rectangles, predictors, numbers, experts)
        return PackedBatch(tokens[None].to(device()), positions[None].to(device()), params, share=None, **flat)
    owners = find_owners(positions, laid.sizes[laid.segment_of], context.size)
    mine = owners == context.rank
    share = share_responses(owners[predictors], context, device())
    predictors = (mine.cumsum(0) - 1)[predictors][share.mine.cpu()]
    experts = None if experts is None else experts[mine]
    params = _build_params(laid, rectangles, predictors, numbers[mine], experts)
    if rectangles:
        params.attention_share = share_attention(rectangles, laid.sizes, positions, owners, context, device())
    return PackedBatch(tokens[mine][None].to(device()), positions[mine][None].to(device()), params, share=share, **flat)


def _cut_segments(sequences: Sequences, picked: Tensor, share_prompts: bool) -> Segments:
    """Whole rows and shared prompts, longest first; then the responses to these, longest first."""
    starts = (sequences.lengths.cumsum(0) - sequences.lengths)[picked].tolist()
    lengths, prompts = sequences.lengths[picked].tolist(), sequences.prompt_lengths[picked].tolist()
    groups = [[row] for row in range(len(picked))]
    if share_prompts and sequences.prompts is not None:
        groups = group_rows(sequences.measure(picked))
    # start, length, row, offset, prompt's length, number of the group if it shares
    wholes: list[tuple[int, int, int, int, int, int]] = []
    responses: list[tuple[int, int, int, int, int, int]] = []
    left_out: list[int] = []
    for number, group in enumerate(groups):
        first, prompt = group[0], prompts[group[0]]
        if len(group) == 1:
            wholes.append((starts[first], lengths[first], first, 0, prompt, -1))
            continue
        wholes.append((starts[first], prompt, first, 0, prompt, number))
        responses += [(starts[row] + prompt, lengths[row] - prompt, row, prompt, 0, number) for row in group]
        left_out += [prompt] * (len(group) - 1)
    for segments in (wholes, responses):
        segments.sort(key=lambda segment: (-segment[1], segment[2]))
    place_of = {segment[-1]: place for place, segment in enumerate(wholes) if segment[-1] >= 0}
    owners = [*([-1] * len(wholes)), *(place_of[segment[-1]] for segment in responses)]
    columns = torch.tensor([*wholes, *responses], dtype=torch.int64).view(-1, 6).T
    return Segments(*columns[:5], *(torch.tensor(x, dtype=torch.int64) for x in (owners, left_out)))


def _lay_out(segments: Segments, sizes: Tensor) -> Layout:
    """sizes: tokens of each packed sequence with its padding; the last one may be padding alone."""
    firsts = sizes.cumsum(0) - sizes
    segment_of = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    places = torch.arange(len(segment_of)) - firsts[segment_of]
    lengths, starts, offsets, prompts = (
        F.pad(x, (0, len(sizes) - len(x)))[segment_of]
        for x in (segments.lengths, segments.starts, segments.offsets, segments.prompt_lengths)
    )
    exists = places < lengths
    response = (exists & (places >= prompts)).nonzero().squeeze(1)
    # The first token after a shared prompt is predicted by that prompt's last.
    prompt = segments.prompts[segment_of[response]]
    last = firsts[prompt] + segments.lengths[prompt] - 1
    predictors = torch.where((prompt >= 0) & (places[response] == 0), last, response - 1)
    return Layout(sizes, firsts, segment_of, places + offsets, exists, (starts + places)[exists], response, predictors)


def _plan_rectangles(segments: Segments, laid: Layout) -> tuple[Rectangle, ...]:
    """Of all packed sequences, in their order; none for Transformer Engine."""
    if uses_transformer_engine():
        return ()
    sizes, sharing = laid.sizes, segments.prompts >= 0
    if not bool(sharing.any()):
        return plan_rectangles(sizes.tolist(), device())
    num_wholes, num_segments = int((~sharing).sum()), len(sharing)
    prompts = segments.prompts[sharing]
    responses = (sizes[num_wholes:num_segments], laid.firsts[num_wholes:num_segments])
    return (
        *plan_rectangles(sizes[:num_wholes].tolist(), device()),
        *plan_responses(*responses, segments.lengths[prompts], laid.firsts[prompts], device()),
        *plan_rectangles(sizes[num_segments:].tolist(), device()),
    )


def _pick(sequences: Sequences, rows: list[int]) -> Tensor:
    """int64: the rows, longest first."""
    picked = torch.tensor(sorted(rows, key=lambda row: (-int(sequences.lengths[row]), row)), dtype=torch.int64)
    prompts, held = sequences.prompt_lengths[picked], sequences.held
    if held is not None and not bool(held[picked].all()):
        raise ValueError(f"row {int(picked[~held[picked]][0])} was not sent to this rank, which computes it")
    if bool((prompts < 1).any()):
        raise ValueError(f"row {int(picked[prompts < 1][0])} has no prompt token")
    return picked


def _place(values: Tensor, laid: Layout) -> Tensor:
    """What `values` has for each token of the batch that exists, 0 elsewhere."""
    placed = values.new_zeros((len(laid.exists), *values.shape[1:]))
    placed[laid.exists] = values[laid.sources]
    return placed


def _pad_sizes(lengths: Tensor, multiple: int, cp: int) -> Tensor:
    """int64: tokens of each packed sequence; one more than `lengths` where the sum needs padding."""
    unit = 1 if cp == 1 else 2 * cp
    sizes = (lengths + unit - 1) // unit * unit
    whole, total = math.lcm(unit, multiple * cp), int(sizes.sum())
    padding = -total % whole if total else whole
    return torch.cat([sizes, torch.tensor([padding])]) if padding else sizes


def _build_params(
    laid: Layout, rectangles: tuple[Rectangle, ...], predictors: Tensor, numbers: Tensor, experts: Tensor | None
) -> PackedParams:
    """laid: of all context-parallel ranks; the others: of this one."""
    cu_seqlens = F.pad(laid.sizes.cumsum(0), (1, 0)).to(torch.int32).to(device())
    # As many rotary angles are made; a response to a shared prompt begins behind it.
    longest = int(laid.positions.max()) + 1
    return PackedParams(
        # Under "sbhd" Megatron keeps tensors as [S, 1, H, D] and takes rotary angles as they are.
        qkv_format="thd" if uses_transformer_engine() else "sbhd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        rectangles=rectangles,
        predictors=predictors.to(device()),
        sequence_numbers=numbers.to(device()),
        routed_experts=None if experts is None else experts.to(device()),
    )
