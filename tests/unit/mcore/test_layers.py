"""The local layers and the value head, and log-probabilities, entropies and the KL over the whole vocabulary, against
torch in float64; replayed routes: the experts are given, their weights and the gradient are the router's own.
"""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_checkpoints import build_sequences
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megarl.mcore  # noqa: F401
from megarl.cpu import layers
from megarl.cpu.layers import RMSNorm, packed_causal_attention, plan_rectangles, swiglu
from megarl.mcore import logprobs as module
from megarl.mcore.batch import ContextGroup, build_batch
from megarl.mcore.layers import Replay, moe_utils
from megarl.mcore.logprobs import VocabShard, compute_full_kl, compute_logprobs
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
    config = SimpleNamespace(params_dtype=dtype, sequence_parallel=True, layernorm_zero_centered_gamma=False)
    norm = RMSNorm(config, 24, eps=1e-6)
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


QUANTITIES = ("logprobs", "entropy", "full KL")


def compute(
    quantity: str, logits: torch.Tensor, other: torch.Tensor, temperature: float = 1.0, vocab: int | None = None
) -> list[torch.Tensor]:
    """The logprobs of the tokens 0, 1, 2 ..., with their entropies, or the KL to the logits `other`"""
    vocab = vocab or logits.shape[1]
    shard = VocabShard(0, vocab, None)
    if quantity == "full KL":
        return [compute_full_kl(logits, other, temperature, shard)]
    targets = torch.arange(len(logits)) % vocab
    found = compute_logprobs(logits, targets, temperature, shard, with_entropy=quantity == "entropy")
    assert (found[1] is None) == (quantity == "logprobs")
    return [x for x in found if x is not None]


def reference(quantity: str, logits: torch.Tensor, other: torch.Tensor, temperature: float = 1.0) -> list[torch.Tensor]:
    log_p, log_q = (torch.log_softmax(x / temperature, -1) for x in (logits, other))
    if quantity == "full KL":
        return [torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)]
    logprobs = log_p.gather(1, torch.arange(len(log_p))[:, None] % log_p.shape[1]).squeeze(1)
    return [logprobs, -(log_p.exp() * log_p).sum(-1)][: 1 + (quantity == "entropy")]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk", [1, 100, 1 << 20])
@pytest.mark.parametrize("quantity", QUANTITIES)
def test_values_and_gradient_equal_float64(
    temperature: float, chunk: int, quantity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CPU_CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    num_tokens, vocab, padded = 11, 37, 64
    logits, other = 3 * torch.randn(2, num_tokens, padded, generator=generator)
    weights = torch.randn(2, num_tokens, generator=generator)
    ours, exact = logits.clone().requires_grad_(), logits[:, :vocab].double().requires_grad_()
    found = compute(quantity, ours, other, temperature, vocab)
    expected = reference(quantity, exact, other[:, :vocab].double(), temperature)
    for one, true in zip(found, expected, strict=True):
        assert one.dtype is torch.float32
        torch.testing.assert_close(one.double(), true, rtol=2e-6, atol=5e-6)
    for values in (found, expected):
        sum((x * weight).sum() for x, weight in zip(values, weights, strict=False)).backward()
    atol = 2e-5 if quantity == "full KL" else 2e-6
    torch.testing.assert_close(ours.grad[:, :vocab].double(), exact.grad, rtol=1e-5, atol=atol)
    assert torch.equal(ours.grad[:, vocab:], torch.zeros(num_tokens, padded - vocab))


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_padding_columns_get_no_probability_however_large(quantity: str) -> None:
    logits, other = torch.zeros(3, 8), torch.zeros(3, 8)
    logits[:, 5:], other[:, 6:] = 1e4, -1e4
    expected = reference(quantity, logits[:, :5], other[:, :5])
    torch.testing.assert_close(compute(quantity, logits, other, vocab=5), expected)


def test_large_logits_neither_overflow_nor_lose_the_entropy() -> None:
    logprobs, entropy = compute("entropy", torch.tensor([[3e4, 3e4, 0.0]]), torch.zeros(1, 3))
    assert logprobs.item() == pytest.approx(-0.6931472, abs=1e-5)
    assert entropy.item() == pytest.approx(0.6931472, abs=1e-2)
    logits = torch.tensor([[300.0, 0.0]]).requires_grad_()
    (found,) = compute("full KL", logits, torch.tensor([[0.0, 300.0]]))
    found.sum().backward()
    assert found.item() == pytest.approx(300.0)
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_bfloat16_logits_give_float32_numbers_and_bfloat16_gradients_to_the_policy_alone(quantity: str) -> None:
    logits, other = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    ours, other = logits.clone().requires_grad_(), other.requires_grad_()
    found = compute(quantity, ours, other)
    expected = reference(quantity, logits.double(), other.detach().double())
    torch.testing.assert_close(found, [x.float() for x in expected], rtol=1e-5, atol=1e-5)
    found[0].sum().backward()
    assert ours.grad.dtype is torch.bfloat16
    assert other.grad is None


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_no_tokens_give_no_numbers_and_zero_gradient(quantity: str) -> None:
    logits = torch.zeros(0, 8, requires_grad=True)
    found = compute(quantity, logits, torch.zeros(0, 8))
    found[0].sum().backward()
    assert {x.shape for x in found} == {(0,)}
    assert logits.grad.shape == (0, 8)


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_a_temperature_that_is_not_positive_is_refused(quantity: str) -> None:
    with pytest.raises(ValueError, match="temperature must be positive"):
        compute(quantity, torch.zeros(1, 2), torch.zeros(1, 2), 0.0)


class LargestTensor(TorchDispatchMode):
    """The most elements of a float32 tensor that any operation returned."""

    num_elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float32:
                self.num_elements = max(self.num_elements, tensor.numel())
        return out


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_no_float32_tensor_is_larger_than_a_chunk_forward_or_backward(
    quantity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, rows_of_a_chunk = 1000, 3
    monkeypatch.setattr(module, "CPU_CHUNK", rows_of_a_chunk * vocab)
    logits = torch.randn(50, vocab, dtype=torch.bfloat16, requires_grad=True)
    with LargestTensor() as largest:
        sum(x.sum() for x in compute(quantity, logits, logits.detach().flip(0), 0.7)).backward()
    assert logits.grad.abs().sum() > 0
    assert vocab <= largest.num_elements <= rows_of_a_chunk * vocab


topk_routing_with_score_function = moe_utils.topk_routing_with_score_function

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 3.0, 1.0, 2.0], [1.0, 0.0, 0.5, -2.0]])
GIVEN = 1 + torch.tensor([[3, 1], [3, 1], [-1, -1]], dtype=torch.int16)
"""Another set than the highest scores, the same set, and the router's own choice"""


def route(logits: torch.Tensor, experts: torch.Tensor | None, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    replay = Replay()
    replay.experts = experts
    return topk_routing_with_score_function(logits, 2, router_replay=replay, **options)


def test_given_experts_are_weighed_by_the_softmax_of_the_routers_own_scores_over_them() -> None:
    weights, routes = route(LOGITS, GIVEN)
    high, low = 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2))
    one, other = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))
    half, rest = 1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(0.5))
    expected = torch.tensor([[0, high, 0, low], [0, one, 0, other], [half, 0, rest, 0]])
    torch.testing.assert_close(weights, expected)
    assert torch.equal(routes, expected > 0)


@pytest.mark.parametrize("with_bias", [True, False])
def test_given_experts_have_the_softmax_over_all_or_sigmoids_without_a_correction_bias(with_bias: bool) -> None:
    if with_bias:
        bias = torch.tensor([0.0, 0.0, 9.0, 0.0])
        weights, routes = route(LOGITS, GIVEN, score_function="sigmoid", expert_bias=bias)
        scores = LOGITS.sigmoid() * routes
        expected = scores / scores.sum(-1, keepdim=True)
    else:
        weights, routes = route(LOGITS, GIVEN, use_pre_softmax=True)
        expected = LOGITS.softmax(-1) * routes
    torch.testing.assert_close(weights, expected)
    assert routes.nonzero().tolist() == [[0, 1], [0, 3], [1, 1], [1, 3], [2, 0], [2, 2]]


def test_the_gradient_reaches_the_scores_of_the_given_experts_alone() -> None:
    logits = LOGITS.clone().requires_grad_()
    slope = torch.tensor([[5.0, 1.0, 7.0, -2.0]] * 3)
    weights, _ = route(logits, GIVEN)
    (weights * slope).sum().backward()
    # d w_i / d s_j = w_i (delta_ij - w_j) over the given experts
    w = weights.detach()
    torch.testing.assert_close(logits.grad, w * (slope - (w * slope).sum(-1, keepdim=True)))
    assert logits.grad[0, [0, 2]].tolist() == [0, 0]
    assert logits.grad[0, 1] > 0.1


@pytest.mark.parametrize("options", [{}, {"use_pre_softmax": True}, {"score_function": "sigmoid"}])
@pytest.mark.parametrize("topk", [2, 5, 8])
def test_the_routers_own_experts_in_any_order_give_the_same_bits(options: dict[str, Any], topk: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(200, 16, generator=generator)
    slope = torch.randn(200, 16, generator=generator)
    own = topk_routing_with_score_function(logits, topk, **options)[1].nonzero()[:, 1].view(200, topk)
    shuffled = torch.stack([row[torch.randperm(topk, generator=generator)] for row in own])
    replay, found = Replay(), []
    replay.experts, replay.is_counting = (shuffled + 1).to(torch.uint8), True
    for given in (None, replay):
        x = logits.clone().requires_grad_()
        weights, routes = topk_routing_with_score_function(x, topk, router_replay=given, **options)
        (weights * slope).sum().backward()
        found.append((weights.detach(), routes, x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert replay.counts.tolist() == [200, 200]


@pytest.mark.parametrize("cp", [1, 2])
def test_experts_go_with_their_tokens_into_every_share_of_a_batch(cp: int) -> None:
    sequences = build_sequences()
    number = 1 + torch.arange(len(sequences.tokens), dtype=torch.int16)
    sequences = type(sequences)(
        number.long(), sequences.lengths, sequences.prompt_lengths, number[:, None, None].expand(-1, 3, 2)
    )
    for rank in range(cp):
        batch = build_batch(sequences, [4, 1, 7], multiple=8, context=ContextGroup(cp, rank))
        experts, real = batch.params.routed_experts, batch.params.sequence_numbers >= 0
        assert experts.shape == (batch.tokens.shape[1], 3, 2)
        assert (experts[~real] == 0).all()
        assert torch.equal(experts[real], batch.tokens[0, real].to(torch.int16)[:, None, None].expand(-1, 3, 2))
    assert build_batch(replace(sequences, routed_experts=None), [4]).params.routed_experts is None
