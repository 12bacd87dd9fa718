"""What each rank of a role is sent of a batch: the rows that it computes, not those of other data-parallel ranks.

The packing decides which rows those are, here as in the ranks: it follows from the lengths of all rows, which every
rank has. Of an update the ranks before the last pipeline stage need no targets. A share is made of NumPy arrays without
padding, which Ray writes to its object store without a further copy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.algo.blocks import allocate_zeros
from megarl.algo.tokens import LossCounts, count_minibatch
from megarl.mcore.microbatches import plan_microbatches
from megarl.mcore.model.architecture import read_architecture
from megarl.mcore.worker_spec import Role, WorkerSpec
from megarl.types import Sequences, TrainingSamples

CRITIC_FIELDS = ("mask", "loss_mask", "critic_mask", "old_values", "returns")
"""Targets that a critic's loss reads; a policy's reads those of POLICY_FIELDS"""
POLICY_FIELDS = (
    *("mask", "loss_mask", "advantages", "rollout_logprobs", "old_logprobs", "sampling_logprobs", "ref_logprobs"),
)
OPTIONAL = ("critic_mask", "old_values", "returns", "sampling_logprobs", "ref_logprobs")
"""Where they are not sent, they are None; others are 0"""


@dataclass(frozen=True)
class SequenceShare:
    """K of B sequences."""

    lengths: NDArray[np.int64]
    """[B]"""
    prompt_lengths: NDArray[np.int64]
    """[B]"""
    rows: NDArray[np.int64]
    """[K], ascending"""
    tokens: NDArray[np.int64]
    """[sum of the K lengths]"""
    routed_experts: NDArray[Any] | None
    """[sum of the K lengths, layers, experts of a token]"""
    prompts: NDArray[np.int64] | None
    """[B]"""

    def unfold(self) -> Sequences:
        """All B sequences; the tokens of the others are 0 and take no memory."""
        held = torch.zeros(len(self.lengths), dtype=torch.bool)
        held[torch.tensor(self.rows)] = True
        experts = None if self.routed_experts is None else self._place(self.routed_experts)
        lengths, prompts = torch.tensor(self.lengths), torch.tensor(self.prompt_lengths)
        numbers = None if self.prompts is None else torch.tensor(self.prompts)
        return Sequences(self._place(self.tokens), lengths, prompts, experts, held, numbers)

    def _place(self, values: NDArray[Any]) -> Tensor:
        """[sum of the K lengths, ...] -> [sum of all lengths, ...]"""
        dtype = torch.from_numpy(np.empty(0, values.dtype)).dtype
        placed = allocate_zeros((int(self.lengths.sum()), *values.shape[1:]), dtype)
        view, starts, place = placed.numpy(), self.lengths.cumsum() - self.lengths, 0
        for row in self.rows.tolist():
            start, length = int(starts[row]), int(self.lengths[row])
            view[start : start + length] = values[place : place + length]
            place += length
        return placed


@dataclass(frozen=True)
class SampleShare:
    """K of B samples."""

    sequences: SequenceShare
    positive: NDArray[np.bool_]
    """[B]"""
    width: int
    """T of the padded tensors"""
    targets: Mapping[str, NDArray[Any]]
    """By field of TrainingSamples [sum of the K responses' lengths]; fields that this rank reads"""
    kinds: Mapping[str, str]
    """The dtype of every [B, T] field that the samples have"""

    def unfold(self) -> TrainingSamples:
        """All B samples; the targets of the others are 0 and take no memory."""
        share = self.sequences
        places = {name: self._place(name) for name in self.kinds}
        missing = {field.name: None for field in fields(TrainingSamples)} | places
        return TrainingSamples(
            **(missing | {"sequences": share.unfold(), "positive": torch.tensor(self.positive)})  # type: ignore[arg-type]
        )

    def _place(self, name: str) -> Tensor | None:
        """[B, T]; None: an optional field that this rank does not read."""
        if name not in self.targets and name in OPTIONAL:
            return None
        share = self.sequences
        dtype = torch.from_numpy(np.empty(0, self.kinds[name])).dtype
        placed = allocate_zeros((len(share.lengths), self.width), dtype)
        if name in self.targets:
            view, place = placed.numpy(), 0
            responses = share.lengths - share.prompt_lengths
            for row in share.rows.tolist():
                length = int(responses[row])
                view[row, :length] = self.targets[name][place : place + length]
                place += length
        return placed


class Sharer:
    """Divides batches over the ranks of one role."""

    def __init__(self, spec: WorkerSpec):
        self._spec = spec
        self._arch = read_architecture(Path(spec.checkpoint))

    def find_kind(self, rank: int) -> tuple[int, bool]:
        """The rank's number among the data-parallel ones, and whether it is of the last pipeline stage. Ranks of one
        kind are sent the same. Megatron numbers the ranks of a stage in a row, those of a replica first.
        """
        parallel = self._spec.parallel
        per_stage = parallel.num_processes // parallel.pp
        return rank % per_stage // (parallel.tp * parallel.cp), rank // per_stage == parallel.pp - 1

    def share_sequences(self, sequences: Sequences) -> list[SequenceShare]:
        """What each data-parallel rank is sent."""
        everything = [torch.arange(sequences.num_samples)]
        return [self._cut(sequences, rows) for rows in self._choose_rows(sequences, everything)]

    def share_samples(
        self, samples: TrainingSamples, minibatches: Sequence[Tensor]
    ) -> dict[tuple[int, bool], SampleShare]:
        """What the ranks of each kind are sent. samples: without critic_sequences."""
        found = {}
        for number, rows in enumerate(self._choose_rows(samples.sequences, minibatches)):
            sequences = self._cut(samples.sequences, rows)
            for is_last in {False, True} if self._spec.parallel.pp > 1 else {True}:
                found[number, is_last] = self._fold(samples, sequences, is_last)
        return found

    def _choose_rows(self, sequences: Sequences, minibatches: Sequence[Tensor]) -> list[Tensor]:
        """Of each data-parallel rank: int64 [K], ascending, the rows of its micro-batches."""
        chosen: list[set[int]] = [set() for _ in range(self.count_ranks())]
        for rows in minibatches:
            shares = plan_microbatches(self._spec, self._arch, sequences.measure(rows), len(chosen))
            for own, share in zip(chosen, shares, strict=True):
                own.update(int(rows[place]) for microbatch in share for place in microbatch)
        return [torch.tensor(sorted(own), dtype=torch.int64) for own in chosen]

    def count_ranks(self) -> int:
        """Data-parallel ranks."""
        parallel = self._spec.parallel
        return parallel.num_processes // (parallel.tp * parallel.pp * parallel.cp)

    def _cut(self, sequences: Sequences, rows: Tensor) -> SequenceShare:
        own = sequences.select(rows)
        experts = own.routed_experts if self._spec.router_replay else None
        return SequenceShare(
            sequences.lengths.numpy(),
            sequences.prompt_lengths.numpy(),
            rows.numpy(),
            own.tokens.numpy(),
            None if experts is None else experts.numpy(),
            None if sequences.prompts is None else sequences.prompts.numpy(),
        )

    def _fold(self, samples: TrainingSamples, sequences: SequenceShare, has_targets: bool) -> SampleShare:
        padded = {field.name: getattr(samples, field.name) for field in fields(samples)}
        padded = {name: value.numpy() for name, value in padded.items() if is_padded(name) and value is not None}
        read = CRITIC_FIELDS if self._spec.role is Role.critic else POLICY_FIELDS
        responses = (sequences.lengths - sequences.prompt_lengths).tolist()
        rows = [(row, responses[row]) for row in sequences.rows.tolist()]
        targets = {
            name: np.concatenate([values[row, :length] for row, length in rows] or [values[:0, 0]])
            for name, values in padded.items()
            if has_targets and name in read
        }
        kinds = {name: str(values.dtype) for name, values in padded.items()}
        return SampleShare(sequences, samples.positive.numpy(), samples.mask.shape[1], targets, kinds)


def is_padded(name: str) -> bool:
    """Whether a field of TrainingSamples is [B, T]."""
    return name not in ("sequences", "positive", "critic_sequences")


def count_minibatches(samples: TrainingSamples, minibatches: Sequence[Tensor]) -> list[LossCounts]:
    """The counts of every minibatch, by which the ranks, which have a part of it each, divide their losses."""
    return [count_minibatch(samples, rows) for rows in minibatches]
