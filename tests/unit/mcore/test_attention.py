import pytest
import torch
from torch.nn import functional as F

import megarl.mcore  # noqa: F401
from megarl.cpu import layers
from megarl.cpu.layers import packed_causal_attention, plan_rectangles

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


def test_dense_and_blocked_attention_agree_in_float32() -> None:
    query, key, value = torch.randn(3, 4, 50, 16), torch.randn(3, 2, 50, 16), torch.randn(3, 2, 50, 16)
    dense = layers._dense_attention(query, key, value, 0.25)
    blocked = layers._attention(query, key, value, 0.25)
    torch.testing.assert_close(dense, blocked, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", LENGTHS.values())
def test_rectangles_cover_every_token_once_with_bounded_padding(lengths: list[int]) -> None:
    rectangles = plan_rectangles(sorted(lengths, reverse=True))
    assert sum(rectangle.num_tokens for rectangle in rectangles) == sum(lengths)
    for rectangle in rectangles:
        cells = rectangle.num_rows * rectangle.width
        assert rectangle.width <= layers.NARROW or rectangle.num_tokens >= layers.SHARE * cells


def test_many_short_sequences_make_one_rectangle() -> None:
    assert len(plan_rectangles([60] * 100 + [30] * 100 + [4] * 56)) == 1
