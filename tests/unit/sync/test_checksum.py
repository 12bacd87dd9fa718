"""Checksums that add up over parts of a tensor, and what they catch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.sync.plan import MASK, Copy, TensorSlice, compute_checksum, find_words

DTYPES = [torch.bfloat16, torch.float32]


def whole(x: torch.Tensor, word: int) -> int:
    return compute_checksum(x, TensorSlice(0, 0, *x.shape), word)


@settings(max_examples=40)
@given(
    rows=st.integers(2, 40),
    cols=st.integers(2, 9),
    row=st.integers(1, 39),
    col=st.integers(1, 8),
    dtype=st.sampled_from(DTYPES),
    aligned=st.booleans(),
)
def test_the_checksum_of_a_tensor_is_the_sum_of_those_of_its_parts(
    rows: int, cols: int, row: int, col: int, dtype: torch.dtype, aligned: bool
) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    unit, word = (8 // size, 8) if aligned else (1, size)
    x = torch.randn(rows, cols * unit, generator=torch.Generator().manual_seed(rows)).to(dtype)
    row, col = min(row, rows - 1), min(col, cols - 1) * unit
    regions = [
        TensorSlice(0, 0, row, col),
        TensorSlice(0, col, row, x.shape[1] - col),
        TensorSlice(row, 0, rows - row, col),
        TensorSlice(row, col, rows - row, x.shape[1] - col),
    ]
    assert sum(compute_checksum(region.of(x), region, word) for region in regions) & MASK == whole(x, word)


@pytest.mark.parametrize("word", [0, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_changed_bit_two_swapped_elements_rows_or_columns_change_it(dtype: torch.dtype, word: int) -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    word = word or x.element_size()
    before = whole(x, word)
    assert whole(x.clone(), word) == before
    for bit in range(8 * x.element_size()):
        changed = x.clone()
        bits = changed.view(torch.int16 if x.element_size() == 2 else torch.int32)
        bits[17, 5] ^= -(1 << bit) if bit == 8 * x.element_size() - 1 else 1 << bit
        assert whole(changed, word) != before, bit
    swapped = x.clone()
    swapped[3, 4], swapped[50, 9] = x[50, 9], x[3, 4]
    rows, cols = x.clone(), x.clone()
    rows[[1, 60]] = x[[60, 1]]
    cols[:, [0, 31]] = x[:, [31, 0]]
    for other in (swapped, rows, cols, x.roll(1, 0), x.roll(4, 1)):
        assert whole(other, word) != before


def test_words_are_of_eight_bytes_only_where_every_part_has_its_bounds_there() -> None:
    def copy(name: str, col: int, num_cols: int, size: int) -> Copy:
        return Copy("", TensorSlice(0, 0, 1, num_cols), name, TensorSlice(0, col, 1, num_cols), size)

    copies = [copy("a", 0, 4, 2), copy("a", 4, 8, 2), copy("b", 0, 4, 2), copy("b", 4, 2, 2), copy("c", 0, 1, 4)]
    assert find_words(copies) == {"a": 8, "b": 2, "c": 4}
