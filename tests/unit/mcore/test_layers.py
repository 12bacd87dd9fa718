"""The local layers against torch in float64, and the value head."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import megarl.mcore  # noqa: F401
from megarl.cpu import layers
from megarl.cpu.layers import RMSNorm, packed_causal_attention, plan_rectangles, swiglu
from megarl.mcore.model import ValueHead, squash

LENGTHS = {
    "equal": [7, 7, 7],
    "one": [33],
    "short": [64, 30, 5, 1, 1],
    "mixed": [300, 290, 120, 100, 70, 64, 3],
    "unsorted": [3, 90, 17, 90, 200, 1],
}


def one_by_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    parts = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        q, k, v = (x.transpose(0, 1).double() for x in (q, k, v))
        group = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1))
    return torch.cat(parts)


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_attention_equals_one_by_one(name: str, num_kv_heads: int, dtype: torch.dtype) -> None:
    lengths, size = LENGTHS[name], 16
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(sum(lengths), heads, size, generator=generator).to(dtype).requires_grad_()
        for heads in (4, num_kv_heads, num_kv_heads)
    ]
    weights = torch.randn(sum(lengths), 4 * size, generator=generator)
    found = packed_causal_attention(*inputs, plan_rectangles(lengths), size**-0.5)
    grads = torch.autograd.grad((found.double() * weights).sum(), inputs)
    expected = one_by_one(*inputs, lengths)
    expected_grads = torch.autograd.grad((expected * weights).sum(), inputs)
    tolerance = 1e-5 if dtype is torch.float32 else 0.06
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    for grad, exact in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad.double(), exact.double(), rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("lengths", LENGTHS.values())
def test_rectangles_cover_every_token_once_with_bounded_padding(lengths: list[int]) -> None:
    rectangles = plan_rectangles(sorted(lengths, reverse=True))
    assert sum(rectangle.num_tokens for rectangle in rectangles) == sum(lengths)
    for rectangle in rectangles:
        cells = rectangle.num_rows * rectangle.width
        assert rectangle.width <= layers.NARROW or rectangle.num_tokens >= layers.SHARE * cells


def build_norm(dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(SimpleNamespace(params_dtype=dtype, sequence_parallel=True), 24, eps=1e-6)
    with torch.no_grad():
        norm.weight.add_(torch.randn(24).to(dtype) / 4)
    return norm


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_rms_norm_and_its_gradients_equal_torchs_in_float64(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    norm = build_norm(dtype)
    assert norm.weight.sequence_parallel
    x = torch.randn(5, 3, 24).to(dtype).requires_grad_()
    weights = torch.randn(5, 3, 24)
    out = norm(x)
    assert out.dtype is dtype
    (out * weights).sum().backward()
    exact_x, exact_w = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    exact = torch.nn.functional.rms_norm(exact_x, (24,), exact_w, 1e-6)
    (exact * weights).sum().backward()
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(x.grad.double(), exact_x.grad, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(norm.weight.grad.double(), exact_w.grad, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_and_its_gradient_are_megatrons_chain_bit_for_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 1, 48, dtype=dtype).requires_grad_()
    chain_x = x.detach().clone().requires_grad_()
    weights = torch.randn(7, 1, 24, dtype=dtype)
    gate, up = torch.chunk(chain_x, 2, dim=-1)
    chain = torch.nn.functional.silu(gate) * (up + 0.0)
    chain.backward(weights)
    out = swiglu(x)
    out.backward(weights)
    assert torch.equal(out, chain)
    assert torch.equal(x.grad, chain_x.grad)


def test_bounded_values_and_their_gradient_by_hand() -> None:
    """atan(1) = pi/4: a quarter of the range beyond its middle; the slope is range / (pi (1 + z^2))."""
    z = torch.tensor([0.0, 1.0, -1.0, 1e6, -1e6], requires_grad=True)
    values = squash(z, -1.0, 3.0)
    torch.testing.assert_close(values[:3], torch.tensor([1.0, 2.0, 0.0]))
    assert -1.0 <= values[4] < -0.99999
    assert 2.99999 < values[3] <= 3.0
    values.sum().backward()
    head = ValueHead(SimpleNamespace(params_dtype=torch.bfloat16, hidden_size=8))
    with torch.no_grad():
        head.weight.normal_()
    hidden = torch.randn(5, 1, 8).bfloat16()
    unbounded, head.value_range = head(hidden)[0], (0.0, 1.0)
    assert head(hidden)[0].dtype is torch.float32
    assert torch.equal(head(hidden)[0], squash(unbounded, 0.0, 1.0))
    torch.testing.assert_close(z.grad[:3], torch.tensor([4 / torch.pi, 2 / torch.pi, 2 / torch.pi]))
