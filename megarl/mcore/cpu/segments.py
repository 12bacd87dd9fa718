"""Causal attention over packed sequences through dense rectangles, for machines without a packed kernel.

Shapes: S packed tokens, n sequences of a rectangle, L its width, H query heads, K key heads, D size of a
head. Right-padded rows under a causal mask need no padding mask: a real token never sees the padding to its
right.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# A rectangle up to this wide takes all shorter sequences: a call costs more than the padding that it saves.
NARROW = 64
# Wider rectangles take sequences down to this share of their width.
SHARE = 0.75
# In bfloat16 on a CPU the scores are held up to this width: the backward of torch's blocked kernel takes 2
# to 8 times as long there. The choice does not depend on gradients: the same weights give the same log-probs.
DENSE = 256


@dataclass(frozen=True)
class Rectangle:
    """Consecutive sequences of a packed batch, as rows of equal width."""

    num_rows: int
    width: int
    num_tokens: int
    source: Tensor | None
    """int64 [n * L]: the rectangle's token in each cell (padding cells repeat a row's last); None: no
    padding
    """
    cells: Tensor | None
    """int64 [num_tokens]: the cell of each token; None: no padding"""

    def to(self, device: torch.device) -> "Rectangle":
        tensors = {name: getattr(self, name) for name in ("source", "cells")}
        return replace(self, **{name: x.to(device) for name, x in tensors.items() if x is not None})


def plan_rectangles(lengths: list[int], device: torch.device | None = None) -> tuple[Rectangle, ...]:
    """Cut packed sequences into rectangles. Sequences sorted by length, longest first, give the fewest."""
    rectangles = [build_rectangle(torch.tensor(lengths[first:last])) for first, last in _cut(lengths)]
    return tuple(rectangle if device is None else rectangle.to(device) for rectangle in rectangles)


def _cut(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """First and one past the last of the sequences of each rectangle."""
    first = 0
    while first < len(lengths):
        width = lengths[first]
        shortest = 0 if width <= NARROW else SHARE * width
        last = first + 1
        while last < len(lengths) and shortest <= lengths[last] <= width:
            last += 1
        yield first, last
        first = last


def build_rectangle(lengths: Tensor) -> Rectangle:
    """The rectangle of consecutive sequences of these lengths (int64), the first of which is the longest."""
    num_rows, width, num_tokens = len(lengths), int(lengths[0]), int(lengths.sum())
    if num_tokens == num_rows * width:
        return Rectangle(num_rows, width, num_tokens, None, None)
    starts = (lengths.cumsum(0) - lengths)[:, None]
    columns = torch.arange(width)[None, :]
    source = (starts + torch.minimum(columns, lengths[:, None] - 1)).reshape(-1)
    cells = (columns < lengths[:, None]).reshape(-1).nonzero().squeeze(1)
    return Rectangle(num_rows, width, num_tokens, source, cells)


class ToCells(torch.autograd.Function):
    """[tokens, ...] -> [cells, ...]: the token in each cell, and the cell of each token for the way back. The
    gradient of further cells, which repeat tokens as padding, is dropped: nothing real depends on them.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, source: Tensor, cells: Tensor) -> Tensor:
        ctx.cells = cells
        return tokens.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.cells), None, None


class _ToTokens(torch.autograd.Function):
    """[n * L, ...] -> [tokens, ...]"""

    @staticmethod
    def forward(ctx: Any, cells: Tensor, rectangle: Rectangle) -> Tensor:
        ctx.rectangle, ctx.shape = rectangle, cells.shape
        assert rectangle.cells is not None, "a full rectangle has its tokens in order"
        return cells.index_select(0, rectangle.cells)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.shape).index_copy_(0, ctx.rectangle.cells, grad), None


def to_rows(tokens: Tensor, rectangle: Rectangle) -> Tensor:
    """[tokens, H, D] -> [n, H, L, D]"""
    cells = tokens
    if rectangle.source is not None:
        cells = ToCells.apply(tokens, rectangle.source, rectangle.cells)  # type: ignore[no-untyped-call]
    return cells.view(rectangle.num_rows, rectangle.width, *tokens.shape[1:]).transpose(1, 2)


def to_tokens(rows: Tensor, rectangle: Rectangle) -> Tensor:
    """[n, H, L, D] -> [tokens, H * D]"""
    cells = rows.transpose(1, 2).reshape(rectangle.num_rows * rectangle.width, -1)
    if rectangle.cells is None:
        return cells
    tokens: Tensor = _ToTokens.apply(cells, rectangle)  # type: ignore[no-untyped-call]
    return tokens


def _dense_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention that holds the scores: query [n, H, L, D], key and value [n, K, L, D] -> [n, H, L, D]."""
    n, num_heads, width, size = query.shape
    num_groups = key.shape[1]
    # The H / K query heads of a group are rows of one product with its key: nothing is repeated.
    repeats = num_heads // num_groups
    q = query.reshape(n * num_groups, repeats * width, size)
    k = key.reshape(n * num_groups, width, size)
    v = value.reshape(n * num_groups, width, size)
    mask = torch.full((width, width), float("-inf"), dtype=q.dtype, device=q.device).triu(1).repeat(repeats, 1)
    scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(-1), v).view(n, num_heads, width, size)


def _attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    if query.dtype is torch.bfloat16 and query.shape[2] <= DENSE and query.device.type == "cpu":
        return _dense_attention(query, key, value, scale)
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)


def packed_causal_attention(
    query: Tensor, key: Tensor, value: Tensor, rectangles: tuple[Rectangle, ...], scale: float
) -> Tensor:
    """query [S, H, D], key and value [S, K, D] with K dividing H -> [S, H * D]; no token sees another sequence."""
    sizes = [rectangle.num_tokens for rectangle in rectangles]
    parts = []
    for rectangle, *packed in zip(rectangles, *(x.split(sizes) for x in (query, key, value)), strict=True):  # type: ignore[no-untyped-call]
        q, k, v = (to_rows(x, rectangle) for x in packed)
        parts.append(to_tokens(_attention(q, k, v, scale), rectangle))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
