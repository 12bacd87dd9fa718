"""Which training rank sends what to which server rank, and the messages that carry it.

Every element that a server rank holds is sent to it once: a pure function of what the ranks on both sides hold. Bytes
are counted at the receivers, in the servers' dtypes. Whole tensors are those of the Hugging Face checkpoint, by its
names. All tensors are treated as matrices: a vector [n] is [n, 1], and all dimensions but the last are flattened,
[E, n, m] to [E * n, m].
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor


@dataclass(frozen=True, order=True)
class TensorSlice:
    """A rectangle of a matrix."""

    row: int
    col: int
    num_rows: int
    num_cols: int

    @property
    def size(self) -> int:
        return self.num_rows * self.num_cols

    def intersect(self, other: "TensorSlice") -> "TensorSlice | None":
        row, col = max(self.row, other.row), max(self.col, other.col)
        num_rows = min(self.row + self.num_rows, other.row + other.num_rows) - row
        num_cols = min(self.col + self.num_cols, other.col + other.num_cols) - col
        return TensorSlice(row, col, num_rows, num_cols) if num_rows > 0 and num_cols > 0 else None

    def of(self, tensor: Tensor) -> Tensor:
        """The view of this rectangle in a tensor."""
        matrix = as_matrix(tensor)
        return matrix[self.row : self.row + self.num_rows, self.col : self.col + self.num_cols]


@dataclass(frozen=True)
class Piece:
    """A rectangle of a whole tensor, and where a rank stores it."""

    tensor: str
    """The rank's own name of the tensor that contains it"""
    row: int
    col: int
    """First row and column of it in that tensor"""
    whole: str
    region: TensorSlice

    def locate(self, part: TensorSlice) -> TensorSlice:
        """Where the rank stores `part`, a part of `region`."""
        return TensorSlice(
            self.row + part.row - self.region.row, self.col + part.col - self.region.col, part.num_rows, part.num_cols
        )


def as_matrix(tensor: Tensor) -> Tensor:
    """The tensor as a matrix, as a view. Raises RuntimeError where its memory layout does not allow one."""
    return tensor.view(-1, 1) if tensor.ndim < 2 else tensor.view(-1, tensor.shape[-1])


def find_runs(numbers: Sequence[int]) -> list[tuple[int, int, int]]:
    """(position, first number, length) of each maximal run of numbers that increase by one."""
    runs: list[tuple[int, int, int]] = []
    for position, number in enumerate(numbers):
        if runs and runs[-1][1] + runs[-1][2] == number and runs[-1][0] + runs[-1][2] == position:
            start, first, length = runs[-1]
            runs[-1] = (start, first, length + 1)
        else:
            runs.append((position, number, 1))
    return runs


ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}

SMALL = 1e-5
"""Share of what a server rank holds, below which a tensor is no reason for one more pair of ranks, each of which costs
buffers: norms and biases, of which every tensor-parallel rank has a replica"""

Pieces = Mapping[int, Sequence[Piece]]
"""The pieces that each rank holds, by rank"""


class LayoutError(ValueError):
    """The servers' tensors cannot be assembled from those of the training ranks; the message names both sides."""


@dataclass(frozen=True)
class Copy:
    """A rectangle of a training rank's tensor that becomes one of a server rank's tensor."""

    source_tensor: str
    source: TensorSlice
    target_tensor: str
    target: TensorSlice
    """Of the same size as `source`"""
    item_size: int
    """Bytes per element at the target"""

    @property
    def num_bytes(self) -> int:
        return self.target.size * self.item_size


@dataclass(frozen=True)
class Bucket:
    """The content of one message: its copies' elements one after the other, row by row, in the target's dtypes."""

    source: int
    target: int
    copies: tuple[Copy, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The byte at which each copy starts, a multiple of its item size."""
        offsets, end = [], 0
        for copy in self.copies:
            start = -(-end // copy.item_size) * copy.item_size
            offsets.append(start)
            end = start + copy.num_bytes
        return tuple(offsets)

    @cached_property
    def num_bytes(self) -> int:
        return self.offsets[-1] + self.copies[-1].num_bytes


Plan = Mapping[tuple[int, int], tuple[Copy, ...]]
"""The copies of each (training rank, server rank), in the order of the server rank's tensors"""


def build_plan(
    sources: Pieces,
    targets: Pieces,
    dtypes: Mapping[str, str],
    is_near: Callable[[int, int], bool] = lambda source, target: True,
) -> Plan:
    """Choose for every element of the server ranks one training rank that sends it.

    sources: pieces of the training ranks, replicas included. targets: pieces of the server ranks. dtypes: of the
    servers' tensors, by name. is_near: whether a training rank and a server rank are on the same node. Among replicas a
    near rank is chosen before others, for SMALL tensors one that sends to this rank already, then the one with the
    least to send so far; largest rectangles first. Raises LayoutError for a part of a server's tensor that no training
    rank holds.
    """
    holders = _find_holders(sources)
    wanted = []
    for rank, pieces in targets.items():
        for number, piece in enumerate(pieces):
            wanted += [(rank, number, piece, region) for region in _cover(piece, holders)]
    wanted.sort(key=lambda item: (-item[3].size, item[0], item[1], item[3]))
    loads = dict.fromkeys(sources, 0)
    small = {rank: SMALL * sum(piece.region.size for piece in pieces) for rank, pieces in targets.items()}
    chosen: dict[tuple[int, int], list[tuple[int, Copy]]] = defaultdict(list)
    for rank, number, piece, region in wanted:
        whole = next(held for held in holders[piece.whole] if held.intersect(region))
        is_small = region.size < small[rank]

        def prefer(
            holder: tuple[int, Piece], rank: int = rank, is_small: bool = is_small
        ) -> tuple[bool, bool, int, int]:
            source, _ = holder
            return not is_near(source, rank), is_small and (source, rank) not in chosen, loads[source], source

        source, own = min(holders[piece.whole][whole], key=prefer)
        copy = Copy(
            own.tensor, own.locate(region), piece.tensor, piece.locate(region), ITEM_SIZES[dtypes[piece.tensor]]
        )
        loads[source] += copy.num_bytes
        chosen[source, rank].append((number, copy))
    return {
        pair: tuple(copy for _, copy in sorted(copies, key=lambda item: (item[0], item[1].target)))
        for pair, copies in sorted(chosen.items())
    }


def _find_holders(sources: Pieces) -> dict[str, dict[TensorSlice, list[tuple[int, Piece]]]]:
    """The ranks and pieces that hold each rectangle, by whole tensor and rectangle."""
    holders: dict[str, dict[TensorSlice, list[tuple[int, Piece]]]] = defaultdict(lambda: defaultdict(list))
    for rank, pieces in sources.items():
        for piece in pieces:
            holders[piece.whole][piece.region].append((rank, piece))
    return holders


def _cover(piece: Piece, holders: Mapping[str, Mapping[TensorSlice, Sequence[tuple[int, Piece]]]]) -> list[TensorSlice]:
    """The piece cut at the boundaries of the training ranks' rectangles. Raises LayoutError where parts are missing."""
    if piece.whole not in holders:
        raise LayoutError(
            f"the servers hold {piece.tensor}, made of {piece.whole}, of which no training rank has any part; the"
            " policy and the servers are different models"
        )
    parts = [part for region in holders[piece.whole] if (part := region.intersect(piece.region))]
    if sum(part.size for part in parts) != piece.region.size:
        raise LayoutError(
            f"the servers hold {piece.region} of {piece.whole} in {piece.tensor}; the training ranks hold"
            f" {sum(part.size for part in parts)} of its {piece.region.size} elements"
        )
    return parts


def compute_bound(targets: Pieces, dtypes: Mapping[str, str]) -> int:
    """The least number of bytes that must reach the server ranks: what they hold, without padding rows."""
    return sum(piece.region.size * ITEM_SIZES[dtypes[piece.tensor]] for pieces in targets.values() for piece in pieces)


def cut_buckets(plan: Plan, max_bytes: int) -> list[Bucket]:
    """The plan as messages of at most `max_bytes` (one row of a tensor at least), in the order of sending.

    All ranks send and receive in this order: pairs of ranks take turns, so that all are busy and none deadlocks.
    """
    turns: dict[int, list[Bucket]] = defaultdict(list)
    sources = sorted({source for source, _ in plan})
    for (source, target), copies in plan.items():
        for turn, bucket in enumerate(_fill_buckets(source, target, copies, max_bytes)):
            turns[turn].append(bucket)

    def place(bucket: Bucket) -> tuple[int, int]:
        return (bucket.target - sources.index(bucket.source)) % len(sources), bucket.source

    return [bucket for turn in sorted(turns) for bucket in sorted(turns[turn], key=place)]


def _fill_buckets(source: int, target: int, copies: Sequence[Copy], max_bytes: int) -> Iterator[Bucket]:
    filled: list[Copy] = []
    size = 0
    for copy in (part for whole in copies for part in _split_rows(whole, max_bytes)):
        if filled and size + copy.num_bytes > max_bytes:
            yield Bucket(source, target, tuple(filled))
            filled, size = [], 0
        filled.append(copy)
        size += copy.num_bytes
    if filled:
        yield Bucket(source, target, tuple(filled))


def _split_rows(copy: Copy, max_bytes: int) -> Iterator[Copy]:
    step = max(1, max_bytes // (copy.target.num_cols * copy.item_size))
    for first in range(0, copy.target.num_rows, step):
        rows = min(step, copy.target.num_rows - first)
        yield replace(
            copy,
            source=replace(copy.source, row=copy.source.row + first, num_rows=rows),
            target=replace(copy.target, row=copy.target.row + first, num_rows=rows),
        )


def encode_bucket(bucket: Bucket) -> list[Any]:
    """The part of the bucket that the receiver must know, as JSON."""
    copies = [[copy.target_tensor, *astuple(copy.target), copy.item_size] for copy in bucket.copies]
    return [bucket.source, bucket.target, copies]


def decode_bucket(encoded: list[Any]) -> Bucket:
    """The bucket that `encode_bucket` wrote, without the regions of its sources."""
    source, target, copies = encoded
    nowhere = TensorSlice(0, 0, 0, 0)
    made = (Copy("", nowhere, name, TensorSlice(*region), item_size) for name, *region, item_size in copies)
    return Bucket(source, target, tuple(made))


MASK = (1 << 64) - 1


def find_words(copies: Iterable[Copy]) -> dict[str, int]:
    """The word size in bytes of each target tensor's checksum, by tensor name.

    copies: all copies that go to one server rank.
    """
    words: dict[str, int] = {}
    for copy in copies:
        bounds = (copy.target.col * copy.item_size, copy.target.num_cols * copy.item_size)
        fits = all(bound % 8 == 0 for bound in bounds)
        words[copy.target_tensor] = min(words.get(copy.target_tensor, 8), 8 if fits else copy.item_size)
    return words
