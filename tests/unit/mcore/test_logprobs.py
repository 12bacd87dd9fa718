"""Log-probabilities, entropies and the KL over the whole vocabulary, against float64 computations of torch."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.mcore import logprobs as module
from megarl.mcore.logprobs import VocabShard, compute_full_kl, compute_logprobs

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
