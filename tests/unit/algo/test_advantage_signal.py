"""Share of an advantage that is about its token, and the critic against the mean of the group or of the batch.

The task with closed forms: n independent fair bits, the number of ones paid at the end. Each bit's true advantage is
+-1/2, so that its mean square is 1/4, and that of what is still to come from token t on is (n - t) / 4.
"""

import dataclasses
import itertools

import pytest
import torch
from algo_cases import compute_critic_metrics, configure, experiences, f64, make_experience, some
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo.algorithm import compute_targets
from megarl.algo.diagnostics import QUARTERS, compute_reliability


def measure_bits(bits_BN, group_size: int = 1, values_BN=None, **algo):
    """The metrics of `compute_targets`; without values: of the exact critic."""
    num_rows, num_bits = bits_BN.shape
    groups = (torch.arange(num_rows) // group_size).tolist()
    rewards = bits_BN.sum(1).tolist()
    e = make_experience(groups, [num_bits] * num_rows, rewards, [False] * num_rows, 0, holes=False)
    if values_BN is None:
        values_BN = bits_BN.cumsum(1) - bits_BN + (num_bits - torch.arange(num_bits)) / 2
    return compute_targets(dataclasses.replace(e, values=values_BN), configure(**algo), 0.0)[1]


def list_all(num_bits: int):
    """Every sequence once: a mean over the batch is the expectation."""
    return f64(list(itertools.product([0, 1], repeat=num_bits)))


def get_fractions(metrics, name: str = "signal_frac") -> list[float]:
    return [metrics[f"advantage/{name}_at_{quarter}"] for quarter in QUARTERS]


@pytest.mark.parametrize("lambda_", [0.0, 0.5, 0.95, 1.0])
def test_signal_of_an_exact_critic_on_n_bits_is_its_closed_form(lambda_):
    n = 8
    metrics = measure_bits(list_all(n), lambda_policy=lambda_)
    power = [sum(lambda_ ** (2 * k) for k in range(n - t)) for t in range(n)]
    quarters = [[0, 1], [2, 3], [4, 5], [6]]  # without the last token
    assert get_fractions(metrics) == pytest.approx([len(q) / sum(power[t] for t in q) for q in quarters])


def test_signal_of_group_advantages_on_n_bits_is_its_closed_form():
    n, k = 4, 2
    pairs = torch.stack([torch.cat(pair) for pair in itertools.product(list_all(n), repeat=2)]).view(-1, n)
    metrics = measure_bits(pairs, group_size=k)
    # R - the other's R has the variance n / 4 * k / (k - 1)
    found = {name: metrics[name] for name in metrics if "signal_frac_group" in name}
    # The last quarter is the last token.
    assert found == pytest.approx({f"advantage/signal_frac_group_at_{q}": (k - 1) / (k * n) for q in QUARTERS[:3]})
    # The critic's error is (n - t) / 4 at token t, 2.5 / 4 on average.
    assert metrics["critic/mse_vs_group"] == pytest.approx(2.5 / (n * k / (k - 1)))
    assert metrics["critic/mse_vs_group_first"] == pytest.approx((k - 1) / k)


@some
@given(experiences(), st.sampled_from([1.0, 0.9, 0.0]))
def test_signal_and_errors_equal_a_loop_over_the_tokens(e, gamma):
    outcomes, advantages = e.old_logprobs, e.rollout_logprobs
    metrics = compute_critic_metrics(e.values, outcomes, outcomes, e.mask, advantages, e.groups, gamma)
    rows = [[t for t, g in enumerate(m) if g] for m in e.mask.tolist()]
    signal, power = {q: [] for q in QUARTERS}, {q: [] for q in QUARTERS}
    for i, row in enumerate(rows):
        errors = [(outcomes[i, t] - e.values[i, t]).item() ** 2 for t in row]
        for n, t in enumerate(row[:-1]):
            name = QUARTERS[4 * n // len(row)]
            signal[name].append(errors[n] - gamma**2 * errors[n + 1])
            power[name].append(advantages[i, t].item() ** 2)
    found = {k.removeprefix("advantage/signal_frac_at_"): v for k, v in metrics.items() if "signal_frac_at" in k}
    assert found == pytest.approx({q: sum(signal[q]) / sum(power[q]) for q in QUARTERS if power[q]}, abs=1e-9)
    firsts = [outcomes[i, row[0]].item() if row else None for i, row in enumerate(rows)]
    mates = [
        [firsts[j] for j in range(len(rows)) if j != i and rows[j] and e.groups[j] == e.groups[i]]
        for i in range(len(rows))
    ]
    compared = [i for i, row in enumerate(rows) if row and mates[i]]
    if not compared:
        assert "critic/mse_vs_group" not in metrics
        return
    baseline = [(firsts[i] - sum(mates[i]) / len(mates[i])) ** 2 for i in compared]
    squares = [[(outcomes[i, t] - e.values[i, t]).item() ** 2 for t in rows[i]] for i in compared]
    expected = sum(map(sum, squares)) / sum(b * len(s) for b, s in zip(baseline, squares, strict=True))
    assert metrics["critic/mse_vs_group"] == pytest.approx(expected)
    assert metrics["critic/mse_vs_group_first"] == pytest.approx(sum(s[0] for s in squares) / sum(baseline))


def test_reliability_by_hand():
    predicted, outcomes = f64([4, 1, 2, 3, 3, 3, 8, 9]), f64([1, 0, 0, 1, 0, 1, 1, 3])
    # Limits 2.75, 3, 5
    expected = {1: (1.5, 0.0), 2: (3.0, 2 / 3), 3: (4.0, 1.0), 4: (8.5, 2.0)}
    found = compute_reliability(predicted, outcomes)
    assert {q: pytest.approx(pair) for q, pair in expected.items()} == found
    assert compute_reliability(f64([2, 2]), f64([0, 1])) == {1: (2.0, 0.5)}
    assert compute_reliability(f64([]), f64([])) == {}
    metrics = compute_critic_metrics(*(x[:, None] for x in (predicted, outcomes, outcomes)), torch.ones(8, 1).bool())
    assert metrics["critic/value_first_q4"] == 8.5
    assert metrics["critic/outcome_middle_q2"] == pytest.approx(2 / 3)
