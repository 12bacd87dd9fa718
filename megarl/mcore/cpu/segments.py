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
    keys: Tensor | None = None
    """int64 [n * (P + L)]: for rows that are responses to prompts of their own in the batch, of P tokens at most, the
    packed token of each key: the prompt's, then the row's. None: the row's alone"""
    mask: Tensor | None = None
    """bool [n, 1, L, P + L]: which of `keys` each cell sees"""

    def to(self, device: torch.device) -> "Rectangle":
        tensors = {name: getattr(self, name) for name in ("source", "cells", "keys", "mask")}
        return replace(self, **{name: x.to(device) for name, x in tensors.items() if x is not None})


def plan_rectangles(lengths: list[int], device: torch.device | None = None) -> tuple[Rectangle, ...]:
    """Cut packed sequences into rectangles. Sequences sorted by length, longest first, give the fewest."""
    rectangles = [build_rectangle(torch.tensor(lengths[first:last])) for first, last in _cut(lengths)]
    return tuple(rectangle if device is None else rectangle.to(device) for rectangle in rectangles)


def plan_responses(
    lengths: Tensor, starts: Tensor, prompt_lengths: Tensor, prompt_starts: Tensor, device: torch.device | None = None
) -> tuple[Rectangle, ...]:
    """Cut consecutive responses into rectangles, each a sequence that goes on after a prompt elsewhere in the batch.

    int64 [n] each: tokens and first packed token of the responses, longest first, and of their prompts.
    """
    rectangles = []
    for first, last in _cut(lengths.tolist()):
        own, start, prompt, prompt_start = (
            x[first:last, None] for x in (lengths, starts, prompt_lengths, prompt_starts)
        )
        columns, before = torch.arange(int(own.max())), torch.arange(int(prompt.max()))
        keys = [prompt_start + torch.minimum(before, prompt - 1), start + torch.minimum(columns, own - 1)]
        earlier = (before < prompt)[:, None].expand(-1, len(columns), -1)
        causal = (columns <= columns[:, None]).expand(len(own), -1, -1)
        rectangle = replace(
            build_rectangle(own[:, 0]),
            keys=torch.cat(keys, 1).reshape(-1),
            mask=torch.cat([earlier, causal], 2)[:, None],
        )
        rectangles.append(rectangle if device is None else rectangle.to(device))
    return tuple(rectangles)


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


def _pick_keys(packed: Tensor, rectangle: Rectangle) -> Tensor:
    """[S, K, D] of the whole batch -> [n, K, P + L, D]"""
    assert rectangle.keys is not None, "these rows have keys of their own alone"
    picked = packed.index_select(0, rectangle.keys)
    return picked.view(rectangle.num_rows, -1, *packed.shape[1:]).transpose(1, 2)


def _dense_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention that holds the scores: query [n, H, L, D], key and value [n, K, M, D] -> [n, H, L, D].

    mask: as in `Rectangle`; None: causal.
    """
    n, num_heads, width, size = query.shape
    num_groups, num_keys = key.shape[1:3]
    # The H / K query heads of a group are rows of one product with its key: nothing is repeated.
    repeats = num_heads // num_groups
    q = query.reshape(n * num_groups, repeats * width, size)
    k = key.reshape(n * num_groups, num_keys, size)
    v = value.reshape(n * num_groups, num_keys, size)
    if mask is None:
        added = torch.full((width, width), float("-inf"), dtype=q.dtype, device=q.device).triu(1).repeat(repeats, 1)
    else:
        added = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
        added = added.expand(-1, num_groups, -1, -1).repeat(1, 1, repeats, 1).flatten(0, 1)
    scores = torch.baddbmm(added, q, k.transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(-1), v).view(n, num_heads, width, size)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    if query.dtype is torch.bfloat16 and query.shape[2] <= DENSE and query.device.type == "cpu":
        return _dense_attention(query, key, value, mask, scale)
    return F.scaled_dot_product_attention(
        *(query, key, value),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def packed_causal_attention(
    query: Tensor, key: Tensor, value: Tensor, rectangles: tuple[Rectangle, ...], scale: float
) -> Tensor:
    """query [S, H, D], key and value [S, K, D] with K dividing H -> [S, H * D]; no token sees another sequence, but for
    a response its prompt.
    """
    sizes = [rectangle.num_tokens for rectangle in rectangles]
    parts = []
    for rectangle, q, k, v in zip(rectangles, query.split(sizes), key.split(sizes), value.split(sizes), strict=True):  # type: ignore[no-untyped-call]
        if rectangle.keys is None:
            keys, values = to_rows(k, rectangle), to_rows(v, rectangle)
        else:
            keys, values = (_pick_keys(x, rectangle) for x in (key, value))
        parts.append(to_tokens(_attention(to_rows(q, rectangle), keys, values, rectangle.mask, scale), rectangle))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
