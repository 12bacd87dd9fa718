"""Between samples, of which a row is a response, and the roles, which compute each segment of a response by itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megarl.interfaces import Pending, TrainBackend
from megarl.types import Metrics, Sequences, TrainingSamples


class SegmentedBackend:
    """A role that is asked in rows of responses, [B, T], and is given rows of segments, [R, S], where there are more
    than one in a response: R of them, of at most S tokens. All else is the role's own."""

    def __init__(self, backend: TrainBackend):
        self._backend = backend

    def logprobs(self, sequences: Sequences, temperature: float, teacher: int = 0) -> Pending[Tensor]:
        return self._ask(self._backend.logprobs, sequences, temperature, teacher)

    def values(self, sequences: Sequences) -> Pending[Tensor]:
        return self._ask(self._backend.values, sequences)

    def reference_kl(self, sequences: Sequences, temperature: float) -> Pending[Tensor]:
        return self._ask(self._backend.reference_kl, sequences, temperature)

    def updated_logprobs(self, sequences: Sequences) -> Pending[Tensor]:
        return self._ask(self._backend.updated_logprobs, sequences)

    def update(self, samples: TrainingSamples, minibatches: Sequence[Tensor]) -> Pending[list[Metrics]]:
        if samples.sequences.segments is None:
            return self._backend.update(samples, minibatches)
        rows = Rows(samples.sequences)
        return self._backend.update(rows.spread(samples), list(map(rows.find, minibatches)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def _ask(self, verb: Callable[..., Pending[Tensor]], sequences: Sequences, *arguments: Any) -> Pending[Tensor]:
        if sequences.segments is None:
            return verb(sequences, *arguments)
        rows = Rows(sequences)
        return _Folded(verb(rows.sequences, *arguments), rows)


class Rows:
    """The rows of segments of these sequences, those of a sample one after the other."""

    def __init__(self, sequences: Sequences):
        assert sequences.segments is not None
        tokens, prompts, lengths, starts = [], [], [], [0]
        self._places: list[tuple[int, Tensor]] = []
        """Of each row, the sample and the numbers of its tokens in the response (int64 [s])"""
        for number, own in enumerate(torch.split(sequences.tokens, sequences.lengths.tolist())):
            num_before = int(sequences.prompt_lengths[number])
            whole = ((torch.arange(len(own) - num_before), own[:num_before]),)
            for columns, before in sequences.segments[number] or whole:
                tokens += [before, own[num_before + columns]]
                prompts.append(len(before))
                lengths.append(len(before) + len(columns))
                self._places.append((number, columns))
            starts.append(len(lengths))
        self._starts = starts
        self._shape = sequences.num_samples, int(sequences.response_lengths.max())
        self.sequences = Sequences(torch.cat(tokens), torch.tensor(lengths), torch.tensor(prompts))

    def find(self, samples: Tensor) -> Tensor:
        """The rows (int64) of these samples."""
        return torch.cat([torch.arange(self._starts[i], self._starts[i + 1]) for i in samples.tolist()])

    @cached_property
    def _index(self) -> tuple[Tensor, Tensor, Tensor]:
        """bool [R, S]: where a row has a token; int64 of each of those tokens: its sample, and its number there."""
        lengths = self.sequences.response_lengths
        has = torch.arange(int(lengths.max())) < lengths[:, None]
        samples = torch.tensor([number for number, _ in self._places]).repeat_interleave(lengths)
        return has, samples, torch.cat([columns for _, columns in self._places])

    def fold(self, found: Tensor) -> Tensor:
        """[R, S] -> [B, T], 0 past a response."""
        has, samples, columns = self._index
        folded = torch.zeros(self._shape, dtype=found.dtype)
        folded[samples, columns] = found[has]
        return folded

    def spread(self, samples: TrainingSamples) -> TrainingSamples:
        """The targets of the tokens of each row; `positive` is that of its response."""
        has, own, columns = self._index

        def spread(value: Tensor) -> Tensor:
            if value.dim() == 1:
                return value[[number for number, _ in self._places]]
            out = torch.zeros(has.shape, dtype=value.dtype)
            out[has] = value[own, columns]
            return out

        given = {each.name: getattr(samples, each.name) for each in fields(samples)}
        given |= {name: spread(value) for name, value in given.items() if isinstance(value, Tensor)}
        return TrainingSamples(**(given | {"sequences": self.sequences}))


@dataclass(frozen=True)
class _Folded:
    """The call's result as rows of responses."""

    call: Pending[Tensor]
    rows: Rows

    def wait(self, timeout_s: float) -> bool:
        return self.call.wait(timeout_s)

    def result(self) -> Tensor:
        return self.rows.fold(self.call.result())
