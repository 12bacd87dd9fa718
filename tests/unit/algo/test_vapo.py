"""VAPO as a whole: its preset, from experience to loss and gradient, against the independent float64
reference.
"""

import math
from types import SimpleNamespace

import pytest
import reference
import torch
from algo_cases import as_lists, build_targets, experiences, make_experience, some
from algo_presets import load_preset
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo.losses import count_minibatch, critic_loss, policy_loss
from megarl.algo.targets import compute_targets

LIMIT = 24
pytestmark = pytest.mark.filterwarnings("ignore:length-adaptive")


def vapo_loss_and_gradient(lp, s, algo):
    """Token-mean clipped surrogate plus positive LM loss, and d loss / d lp derived by hand; lp: lists.

    d(w A)/d lp = w A where the unclipped branch is the smaller one (or both agree), else 0.
    """
    num_tokens = sum(map(sum, s.loss_mask))
    num_positive = sum(sum(row) for row, p in zip(s.loss_mask, s.positive, strict=True) if p)
    loss, gradient = [], [[0.0] * len(row) for row in lp]
    for i, row in enumerate(lp):
        for t, x in enumerate(row):
            if not s.loss_mask[i][t]:
                continue
            a, w = s.advantages[i][t], math.exp(x - s.old[i][t])
            low, high = 1 - algo.clip_low, 1 + algo.clip_high
            held = (a > 0 and w > high) or (a < 0 and w < low)
            loss.append(-(min(max(w, low), high) if held else w) * a / num_tokens)
            gradient[i][t] = 0.0 if held else -w * a / num_tokens
            if s.positive[i]:
                loss.append(-algo.positive_lm_coef * x / num_positive)
                gradient[i][t] -= algo.positive_lm_coef / num_positive
    return math.fsum(loss), gradient


def check(e, seed):
    algo, train = load_preset("vapo")
    assert train.responses_per_prompt == 16
    samples, _ = compute_targets(e, algo, 0.0)
    batch = as_lists(e)
    expected = reference.targets(batch, algo, 0.0)
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(e.mask.shape, generator=g, dtype=torch.float64) * 0.4
    lp = (e.old_logprobs + noise).requires_grad_()
    values = (e.values + noise).requires_grad_()
    rows = torch.arange(len(e.mask))
    targets, counts = build_targets(samples, rows), count_minibatch(samples)
    at = torch.arange(e.mask.shape[1]) < e.sequences.response_lengths[:, None]
    policy = policy_loss(lp[at], None, targets, algo, counts, LIMIT).loss
    critic = critic_loss(values[at], targets, algo, counts).loss
    (policy + critic).backward()

    lists = SimpleNamespace(**vars(expected), mask=batch.mask, old=batch.old)
    loss, gradient = vapo_loss_and_gradient(lp.tolist(), lists, algo)
    assert policy.item() == pytest.approx(loss, abs=1e-9)
    torch.testing.assert_close(lp.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-8, atol=1e-10)
    num_tokens = max(sum(map(sum, batch.mask)), 1)
    errors = [
        [v - r if m else 0.0 for v, r, m in zip(*x, strict=True)]
        for x in zip(values.tolist(), expected.returns, batch.mask, strict=True)
    ]
    assert critic.item() == pytest.approx(sum(x * x for row in errors for x in row) / (2 * num_tokens), abs=1e-9)
    torch.testing.assert_close(values.grad, torch.tensor(errors, dtype=torch.float64) / num_tokens)


@some
@given(experiences(), st.integers(0, 1000))
def test_vapos_loss_and_gradient_equal_the_reference(e, seed):
    check(e, seed)


def test_vapos_loss_and_gradient_equal_the_reference_on_long_responses():
    lengths = [1, 20, 60, 150, 0, 33, 90, 41]
    rewards = [1.0, 0.0, 1.0, -1.0, 0.0, 1.0, 0.3, 0.3]
    check(make_experience([0] * 4 + [1] * 4, lengths, rewards, [False] * 8, 7), 3)


def test_tool_tokens_get_no_gradient_and_change_no_one_elses():
    # The same response with two tool tokens put between its tokens: the same loss, the same gradient.
    algo, _ = load_preset("vapo")
    plain = make_experience([0, 0], [6, 6], [1.0, 0.0], [False] * 2, 11, holes=False)
    spread = torch.tensor([0, 1, 2, 5, 6, 7])
    mask = torch.zeros(2, 8, dtype=torch.bool).index_fill(1, spread, True)

    def widen(x):
        return torch.full((2, 8), torch.nan, dtype=x.dtype).index_copy(1, spread, x)

    names = ("old_logprobs", "rollout_logprobs", "sampling_logprobs", "ref_logprobs", "ref_kl", "values")
    tensors = {name: widen(getattr(plain, name)) for name in names}
    lengths = plain.sequences.lengths + 2
    sequences = type(plain.sequences)(torch.zeros(int(lengths.sum())), lengths, plain.sequences.prompt_lengths)
    holed = type(plain)(**(vars(plain) | tensors | {"mask": mask, "sequences": sequences}))
    results = []
    for e in (plain, holed):
        samples, _ = compute_targets(e, algo, 0.0)
        lp = (e.old_logprobs * 0.9).requires_grad_()
        targets = build_targets(samples, torch.arange(2))
        loss = policy_loss(lp.flatten(), None, targets, algo, count_minibatch(samples), LIMIT).loss
        loss.backward()
        results.append((loss.detach(), lp.grad))
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1][:, spread])
    assert results[1][1][:, 3:5].tolist() == [[0.0, 0.0], [0.0, 0.0]]
