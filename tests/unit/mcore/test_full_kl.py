"""KL over the whole vocabulary, against a float64 computation of torch and by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.mcore import logprobs
from megarl.mcore.logprobs import VocabShard, compute_full_kl


def reference(x: torch.Tensor, y: torch.Tensor, temperature: float) -> torch.Tensor:
    log_p, log_q = torch.log_softmax(x / temperature, -1), torch.log_softmax(y / temperature, -1)
    return torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


def plain(x: list[float], y: list[float], temperature: float) -> tuple[float, list[float]]:
    """The KL and its derivatives in x, by Python's own numbers."""
    p, q = ([math.exp((v - max(z)) / temperature) for v in z] for z in (x, y))
    p, q = ([v / math.fsum(z) for v in z] for z in (p, q))
    logs = [math.log(a) - math.log(b) for a, b in zip(p, q, strict=True)]
    kl = math.fsum(a * d for a, d in zip(p, logs, strict=True))
    return kl, [a * (d - kl) / temperature for a, d in zip(p, logs, strict=True)]


def test_two_tokens_by_hand() -> None:
    # p = 3/4, 1/4; q = 1/2, 1/2: KL = 3/4 ln 3/2 + 1/4 ln 1/2; dKL/dx_j = p_j (ln p_j/q_j - KL)
    logits = torch.tensor([[math.log(3), 0.0]], requires_grad=True)
    found = compute_full_kl(logits, torch.tensor([[7.0, 7.0]]), 1.0, VocabShard(0, 2, None))
    found.sum().backward()
    kl = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert found.item() == pytest.approx(kl, abs=1e-6)
    expected = [0.75 * (math.log(1.5) - kl), 0.25 * (math.log(0.5) - kl)]
    assert logits.grad[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_a_temperature_scales_both_distributions() -> None:
    # logits 2 ln 3 at temperature 2 are the case above
    found = compute_full_kl(
        torch.tensor([[2 * math.log(3), 0.0]]), torch.zeros(1, 2), temperature=2.0, shard=VocabShard(0, 2, None)
    )
    assert found.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk", [1, 100, 1 << 20])
def test_values_and_gradient_equal_float64_autograd(
    temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CPU_CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    num_tokens, vocab, padded = 11, 37, 64
    logits, ref_logits = 3 * torch.randn(2, num_tokens, padded, generator=generator)
    weights = torch.randn(num_tokens, generator=generator)

    ours = logits.clone().requires_grad_()
    found = compute_full_kl(ours, ref_logits, temperature, VocabShard(0, vocab, None))
    (found * weights).sum().backward()
    exact = logits[:, :vocab].double().requires_grad_()
    expected = reference(exact, ref_logits[:, :vocab].double(), temperature)
    (expected * weights).sum().backward()
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(ours.grad[:, :vocab].double(), exact.grad, rtol=1e-5, atol=2e-5)
    assert torch.equal(ours.grad[:, vocab:], torch.zeros(num_tokens, padded - vocab))


LOGITS = st.floats(-8, 8, width=32)


@settings(derandomize=True, max_examples=100)
@given(st.lists(st.tuples(LOGITS, LOGITS), min_size=1, max_size=9), st.sampled_from([0.5, 1.0, 2.0]))
def test_values_and_gradient_equal_plain_python(pairs: list[tuple[float, float]], temperature: float) -> None:
    x, y = (list(z) for z in zip(*pairs, strict=True))
    logits = torch.tensor([x]).requires_grad_()
    found = compute_full_kl(logits, torch.tensor([y]), temperature, VocabShard(0, len(x), None))
    found.sum().backward()
    kl, gradient = plain(x, y, temperature)
    assert found.item() == pytest.approx(kl, rel=1e-5, abs=1e-5)
    assert logits.grad[0].tolist() == pytest.approx(gradient, rel=1e-4, abs=2e-5)


def test_equal_logits_have_no_kl_and_no_gradient_at_all() -> None:
    logits = (20 * torch.randn(5, 100, generator=torch.Generator().manual_seed(0))).requires_grad_()
    found = compute_full_kl(logits, logits.detach().clone(), 0.7, VocabShard(0, 100, None))
    found.sum().backward()
    assert torch.equal(found, torch.zeros(5))
    assert torch.equal(logits.grad, torch.zeros(5, 100))


def test_padding_columns_get_no_probability_however_large() -> None:
    logits, ref_logits = torch.zeros(3, 8), torch.zeros(3, 8)
    logits[:, 5:], ref_logits[:, 6:] = 1e4, -1e4
    found = compute_full_kl(logits, ref_logits, 1.0, VocabShard(0, 5, None))
    assert torch.equal(found, torch.zeros(3))


def test_distributions_that_hardly_overlap_give_a_large_finite_kl() -> None:
    logits, ref_logits = torch.tensor([[300.0, 0.0]]).requires_grad_(), torch.tensor([[0.0, 300.0]])
    found = compute_full_kl(logits, ref_logits, 1.0, VocabShard(0, 2, None))
    found.sum().backward()
    assert found.item() == pytest.approx(300.0)
    assert torch.isfinite(logits.grad).all()


def test_bfloat16_logits_give_a_float32_kl_and_bfloat16_gradients() -> None:
    logits, ref_logits = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    ours = logits.clone().requires_grad_()
    found = compute_full_kl(ours, ref_logits, 1.0, VocabShard(0, 16, None))
    torch.testing.assert_close(found, reference(logits.double(), ref_logits.double(), 1.0).float())
    found.sum().backward()
    assert ours.grad.dtype is torch.bfloat16


def test_the_reference_gets_no_gradient() -> None:
    logits, ref_logits = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    ref_logits.requires_grad_()
    found = compute_full_kl(logits.requires_grad_(), ref_logits, 1.0, VocabShard(0, 8, None))
    found.sum().backward()
    assert ref_logits.grad is None


def test_no_tokens_give_no_kl_and_zero_gradient() -> None:
    logits = torch.zeros(0, 8, requires_grad=True)
    found = compute_full_kl(logits, torch.zeros(0, 8), 1.0, VocabShard(0, 8, None))
    found.sum().backward()
    assert found.shape == (0,)
    assert logits.grad.shape == (0, 8)


def test_what_cannot_be_compared_is_refused() -> None:
    shard = VocabShard(0, 2, None)
    with pytest.raises(ValueError, match="temperature must be positive"):
        compute_full_kl(torch.zeros(1, 2), torch.zeros(1, 2), 0.0, shard)
    with pytest.raises(ValueError, match=r"ref_logits: shape \[1, 3\] found; must be that of logits, \[1, 2\]"):
        compute_full_kl(torch.zeros(1, 2), torch.zeros(1, 3), 1.0, shard)
