"""Packed micro-batches: rows of `Sequences` laid end to end.

Shapes: K rows of the micro-batch, S packed tokens, R response tokens, T response positions of the padded
tensors.
"""

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl.mcore.device import device
from megarl.mcore.segments import Rectangle, plan_rectangles
from megarl.mcore.specs import uses_transformer_engine
from megarl.types import Sequences


@dataclass
class PackedParams(PackedSeqParams):
    """Megatron's packing parameters and what the local attention and the head need besides."""

    rectangles: tuple[Rectangle, ...] = ()
    predictors: Tensor | None = None
    """int64 [R]: packed position whose output predicts each response token"""


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch on the device. Response tokens are flat, in packed order."""

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

    @property
    def num_rows(self) -> int:
        return self.rows.numel()

    def flatten(self, padded: Tensor) -> Tensor:
        """[B, T] of all sequences -> [R] on the device."""
        return padded[self.rows[self.token_rows], self.columns].to(self.targets.device)


def build_batch(sequences: Sequences, rows: list[int], multiple: int = 1) -> PackedBatch:
    """Pack the given rows; S is padded to a multiple of `multiple` with a sequence of its own.

    No rows give a batch of padding only, for a rank that must take part without data.
    Raises ValueError for a sequence without a prompt token: nothing would predict its first response token.
    """
    rows_longest_first = sorted(rows, key=lambda row: (-int(sequences.lengths[row]), row))
    picked = torch.tensor(rows_longest_first, dtype=torch.int64)
    lengths, prompts = sequences.lengths[picked], sequences.prompt_lengths[picked]
    if bool((prompts < 1).any()):
        raise ValueError(f"row {int(picked[prompts < 1][0])} has no prompt token")
    starts = (sequences.lengths.cumsum(0) - sequences.lengths)[picked]
    packed_starts = lengths.cumsum(0) - lengths
    num_tokens = int(lengths.sum())
    where = torch.arange(num_tokens)
    row_of = torch.repeat_interleave(torch.arange(len(picked)), lengths)
    positions = where - packed_starts[row_of]
    tokens = sequences.tokens[starts[row_of] + positions]
    response = (positions >= prompts[row_of]).nonzero().squeeze(1)

    padding = -num_tokens % multiple if num_tokens else multiple
    filler = torch.arange(padding)
    sizes = [*lengths.tolist(), *([padding] if padding else [])]
    target = device()
    return PackedBatch(
        tokens=torch.cat([tokens, torch.zeros_like(filler)])[None].to(target),
        positions=torch.cat([positions, filler])[None].to(target),
        params=_build_params(sizes, (response - 1).to(target)),
        targets=tokens[response].to(target),
        rows=picked,
        token_rows=row_of[response],
        columns=positions[response] - prompts[row_of[response]],
    )


def _build_params(sizes: list[int], predictors: Tensor) -> PackedParams:
    target = device()
    cu_seqlens = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(target)
    with_te = uses_transformer_engine()
    return PackedParams(
        # Under "sbhd" Megatron keeps tensors as [S, 1, H, D] and takes rotary angles as they are.
        qkv_format="thd" if with_te else "sbhd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(sizes),
        max_seqlen_kv=max(sizes),
        rectangles=() if with_te else plan_rectangles(sizes, target),
        predictors=predictors,
    )
