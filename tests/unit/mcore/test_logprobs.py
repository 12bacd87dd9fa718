from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.mcore import logprobs as module
from megarl.mcore.logprobs import VocabShard, compute_full_kl, compute_logprobs


def reference(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(logits / temperature, -1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk", [1, 100, 1 << 20])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradient_equal_float64_log_softmax(
    temperature: float, chunk: int, with_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CPU_CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    num_tokens, vocab, padded = 11, 37, 64
    logits = 5 * torch.randn(num_tokens, padded, generator=generator)
    targets = torch.randint(0, vocab, (num_tokens,), generator=generator)
    weights = torch.randn(2, num_tokens, generator=generator)

    ours = logits.clone().requires_grad_()
    found, entropy = compute_logprobs(ours, targets, temperature, VocabShard(0, vocab, None), with_entropy)
    exact = logits[:, :vocab].double().requires_grad_()
    expected, expected_entropy = reference(exact, targets, temperature)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=2e-6)
    loss, exact_loss = (found * weights[0]).sum(), (expected * weights[0]).sum()
    if with_entropy:
        torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=5e-6)
        loss, exact_loss = (
            loss + (entropy * weights[1]).sum(),
            exact_loss + (expected_entropy * weights[1]).sum(),
        )
    else:
        assert entropy is None
    loss.backward()
    exact_loss.backward()
    torch.testing.assert_close(ours.grad[:, :vocab].double(), exact.grad, rtol=1e-5, atol=2e-6)
    assert torch.equal(ours.grad[:, vocab:], torch.zeros(num_tokens, padded - vocab))


def test_padding_columns_get_no_probability_however_large() -> None:
    logits = torch.zeros(3, 8)
    logits[:, 5:] = 1e4
    found, _ = compute_logprobs(logits, torch.tensor([0, 1, 4]), 1.0, VocabShard(0, 5, None))
    torch.testing.assert_close(found, torch.full((3,), -torch.tensor(5.0).log().item()))


def test_large_logits_neither_overflow_nor_lose_the_entropy() -> None:
    logits = torch.tensor([[3e4, 3e4, 0.0]])
    found, entropy = compute_logprobs(logits, torch.tensor([1]), 1.0, VocabShard(0, 3, None), with_entropy=True)
    assert found.item() == pytest.approx(-0.6931472, abs=1e-5)
    assert entropy.item() == pytest.approx(0.6931472, abs=1e-2)


def test_bfloat16_logits_give_float32_logprobs_and_bfloat16_gradients() -> None:
    logits = torch.randn(4, 16, dtype=torch.bfloat16, requires_grad=True)
    found, _ = compute_logprobs(logits, torch.arange(4), 1.0, VocabShard(0, 16, None))
    expected, _ = reference(logits.detach().double(), torch.arange(4), 1.0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    found.sum().backward()
    assert logits.grad.dtype is torch.bfloat16


def test_no_tokens_give_no_logprobs_and_zero_gradient() -> None:
    logits = torch.zeros(0, 8, requires_grad=True)
    found, _ = compute_logprobs(logits, torch.zeros(0, dtype=torch.int64), 1.0, VocabShard(0, 8, None))
    found.sum().backward()
    assert found.shape == (0,)
    assert logits.grad.shape == (0, 8)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be positive"):
        compute_logprobs(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), temperature, VocabShard(0, 2, None))


class LargestTensor(TorchDispatchMode):
    """The most elements of a float32 tensor that any operation returned."""

    num_elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float32:
                self.num_elements = max(self.num_elements, tensor.numel())
        return out


@pytest.mark.parametrize("quantity", ["logprobs", "entropy", "full KL"])
def test_no_float32_tensor_is_larger_than_a_chunk_forward_or_backward(
    quantity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, rows_of_a_chunk = 1000, 3
    monkeypatch.setattr(module, "CPU_CHUNK", rows_of_a_chunk * vocab)
    logits = torch.randn(50, vocab, dtype=torch.bfloat16, requires_grad=True)
    shard, targets = VocabShard(0, vocab, None), torch.arange(50)
    with LargestTensor() as largest:
        if quantity == "full KL":
            total = compute_full_kl(logits, logits.detach().flip(0), 0.7, shard).sum()
        else:
            found = compute_logprobs(logits, targets, 0.7, shard, with_entropy=quantity == "entropy")
            total = sum(x.sum() for x in found if x is not None)
        total.backward()
    assert logits.grad.abs().sum() > 0
    assert vocab <= largest.num_elements <= rows_of_a_chunk * vocab
