"""A language model of two tables: what comes next depends on the token before and on the prompt's first token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.types import Sequences

EOS = 2
"""Token that ends a response, in every tokenizer of these tests"""


@dataclass(frozen=True)
class ResponseTokens:
    """The R response tokens of all rows, flat, and the state in which each is chosen."""

    rows: Tensor
    columns: Tensor
    before: Tensor
    """int64 [R]: the token before it"""
    first: Tensor
    """int64 [R]: the first of its prompt"""
    chosen: Tensor

    def pad(self, flat: Tensor, num_rows: int) -> Tensor:
        """float32 [B, T], 0 past the response."""
        longest = int(self.columns.max()) + 1 if self.columns.numel() else 0
        padded = torch.zeros(num_rows, longest, dtype=torch.float32)
        padded[self.rows, self.columns] = flat.detach().float()
        return padded


def list_response_tokens(sequences: Sequences) -> ResponseTokens:
    lengths = sequences.response_lengths
    rows = torch.repeat_interleave(torch.arange(sequences.num_samples), lengths)
    columns = torch.arange(rows.numel()) - (lengths.cumsum(0) - lengths)[rows]
    starts = sequences.lengths.cumsum(0) - sequences.lengths
    places = starts[rows] + sequences.prompt_lengths[rows] + columns
    tokens = sequences.tokens
    return ResponseTokens(rows, columns, tokens[places - 1], tokens[starts[rows]], tokens[places])


class TableModel(torch.nn.Module):
    """[R, width]: a row of the first table plus one of the second; width: the vocabulary, or 1 of a critic."""

    def __init__(self, vocab_size: int, width: int, std: float):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.before = torch.nn.Parameter(std * torch.randn(vocab_size, width, generator=generator))
        self.first = torch.nn.Parameter(std * torch.randn(vocab_size, width, generator=generator))

    def forward(self, before: Tensor, first: Tensor) -> Tensor:
        return self.before[before] + self.first[first]


def build_policy(vocab_size: int) -> TableModel:
    """The same weights each time, as from one checkpoint; about one response in five ends at each token."""
    model = TableModel(vocab_size, vocab_size, std=0.5)
    with torch.no_grad():
        model.before[:, EOS] += torch.tensor(0.25 * vocab_size).log()
    return model


def build_critic(vocab_size: int) -> TableModel:
    """A new value head: 0 everywhere."""
    return TableModel(vocab_size, 1, std=0.0)
