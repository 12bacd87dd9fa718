"""tools/bench/mfu.py: whom its profile names."""

from types import ModuleType, SimpleNamespace

import pytest
import torch
from tool_loading import load_tool

from megarl.mcore.model.layers import RMSNorm, swiglu


@pytest.fixture(scope="module")
def mfu() -> ModuleType:
    return load_tool("bench/mfu.py")


def test_products_and_attention_are_counted_and_nothing_else(mfu):
    counted = ("aten::mm", "aten::bmm", "aten::_scaled_dot_product_flash_attention_for_cpu_backward")
    assert all(map(mfu.is_counted, counted))
    assert not any(map(mfu.is_counted, ("aten::mul", "aten::copy_", "aten::_softmax", "aten::mm_like")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="operators of the CPU")
def test_a_profile_names_who_called_an_operator_and_whose_gradient_it_is(mfu):
    norm = RMSNorm(SimpleNamespace(params_dtype=torch.float32, sequence_parallel=False), 64)
    weight = torch.randn(64, 64)

    def compute() -> None:
        swiglu(norm(torch.randn(512, 1, 64)) @ weight).sum().backward()

    compute()
    text = mfu.describe_profile(compute)
    assert "products and attention" in text.splitlines()[0]
    assert "aten::mm" not in text
    assert "ms megarl/mcore/model/layers.py" in text
    assert "ms gradient (_RMSNormBackward) of megarl/mcore/model/layers.py" in text


def test_a_share_is_of_the_operations_that_the_phase_counts(mfu):
    calls = []

    def phase() -> float:
        calls.append(torch.ones(1))
        return 0.0

    shares = mfu.measure(phase, torch.float32, 64, 2)
    assert len(calls) == 3, "the first one warms up"
    assert [share.clock for share in shares] == [0.0, 0.0]
