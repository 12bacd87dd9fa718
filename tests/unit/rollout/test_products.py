"""The servers' products of a few rows on a CPU."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.cpu.standins import megarl_products as products


@given(rows=st.integers(1, 60), inner=st.integers(1, 40), columns=st.integers(1, 80), seed=st.integers(0, 100))
def test_the_product_is_that_of_a_linear_layer(rows: int, inner: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, inner, generator=generator), torch.randn(columns, inner, generator=generator)
    found = products.multiply(x, weight)
    assert found.is_contiguous()
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rows", "is_faster"), [(1, False), (2, True), (products.FEW_ROWS, True)])
def test_it_is_taken_for_a_few_rows_in_float32(rows: int, is_faster: bool) -> None:
    x = torch.zeros(rows, 3)
    assert products.is_faster(x, torch.zeros(5, 3)) is is_faster
    assert not products.is_faster(x.bfloat16(), torch.zeros(5, 3).bfloat16())
    assert not products.is_faster(x[None], torch.zeros(5, 3))
    assert not products.is_faster(torch.zeros(products.FEW_ROWS + 1, 3), torch.zeros(5, 3))
