"""Which part of which whole tensor a rank holds.

Whole tensors are those of the Hugging Face checkpoint, by its names. All tensors are treated as matrices: a vector [n]
is [n, 1], and all dimensions but the last are flattened, [E, n, m] to [E * n, m].
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
