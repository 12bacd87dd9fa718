"""Numbers that tell how a run goes: rewards, lengths, mismatch of the engines, what the critic knows, which share of an
advantage is about its token, and the critic against the mean of the group or of the batch.

The task with closed forms: n independent fair bits, the number of ones paid at the end. Each bit's true advantage is
+-1/2, so that its mean square is 1/4, and that of what is still to come from token t on is (n - t) / 4.
"""

import dataclasses
import itertools
import math

import pytest
import reference
import torch
from algo_cases import compute_critic_metrics, configure, experiences, f64, make_experience, some, with_gaps
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo.algorithm import compute_targets
from megarl.algo.diagnostics import (
    QUARTERS,
    compute_batch_metrics,
    compute_calibration,
    compute_mismatch_metrics,
    compute_quarters,
    compute_reliability,
    compute_replay_metrics,
)
from megarl.config.schema.algo import AlgoConfig, RatioLevel


def test_batch_metrics_by_hand():
    e = make_experience([0, 0, 1, 1], [2, 4, 1, 1], [1.0, 0.0, 0.5, 0.5], [False, True, False, False], 0, holes=False)
    metrics = compute_batch_metrics(e)
    expected = {
        "reward/mean": 0.5,
        "reward/std": 0.125**0.5,  # squares 1/4, 1/4, 0, 0
        "reward/min": 0.0,
        "reward/max": 1.0,
        "reward/equal_groups_frac": 0.5,
        "length/sum": 8.0,
        "length/mean": 2.0,
        "length/min": 1.0,
        "length/max": 4.0,
        "length/truncated_frac": 0.25,
        "reward/failed_frac": 0.0,
    }
    assert metrics == pytest.approx(expected)


def test_mismatch_metrics_by_hand():
    # log ratios 0, ln 4 in one response, ln 0.25 in the other
    e = make_experience([0, 1], [2, 1], [0.0, 1.0], [False] * 2, 0, holes=False)
    four = math.log(4)
    rollout = torch.tensor([[-2.0, -2.0 - four], [-2.0 + four, 0.0]], dtype=torch.float64)
    old = torch.full((2, 2), -2.0, dtype=torch.float64)
    e = dataclasses.replace(e, old_logprobs=old, rollout_logprobs=rollout)
    _, metrics = compute_targets(e, configure(), 0.0)
    assert metrics["mismatch/ratio_mean"] == pytest.approx((1 + 4 + 0.25) / 3)
    assert metrics["mismatch/ratio_max"] == pytest.approx(4)
    assert metrics["mismatch/outside_frac"] == pytest.approx(2 / 3)  # bounds 0.5 and 2
    assert metrics["mismatch/kl"] == pytest.approx((0 + (3 - four) + (-0.75 + four)) / 3)
    assert metrics["mismatch/logprob_gap_max"] == pytest.approx(four)
    _, metrics = compute_targets(e, configure(mismatch__level=RatioLevel.sequence), 0.0)
    assert metrics["mismatch/ratio_mean"] == pytest.approx((4 + 4 + 0.25) / 3)
    _, metrics = compute_targets(e, configure(mismatch__level=RatioLevel.geometric), 0.0)
    assert metrics["mismatch/ratio_mean"] == pytest.approx((2 + 2 + 0.25) / 3)


def test_batch_metrics_are_over_the_samples_of_the_present_policy():
    e = make_experience([0, 0, 1, 1], [2, 4, 3, 5], [1.0, 0.0, 9.0, 9.0], [False, False, True, True], 0, holes=False)
    fresh = compute_batch_metrics(dataclasses.replace(e, ages=torch.tensor([0, 0, 2, 1])))
    alone = make_experience([0, 0], [2, 4], [1.0, 0.0], [False, False], 0, holes=False)
    assert fresh == compute_batch_metrics(alone)
    assert compute_batch_metrics(dataclasses.replace(e, ages=torch.ones(4, dtype=torch.int64))) == {}


def test_quarters_of_a_response_by_hand():
    # l = 3: 0/3, 4/3 and 8/3 of a quarter, rounded down
    assert compute_quarters(torch.tensor([8, 3, 0, 1])).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 0, 1, 2, 0]


def test_replayed_samples_are_reported_apart_by_hand():
    # Fresh: gap ln 2. Replayed, ages 1 and 3: gaps ln 4, 0 and -ln 4.
    two, four = math.log(2), math.log(4)
    e = with_gaps([[two], [four, 0.0], [-four]], [0, 1, 3], [1, 2, 1])
    metrics = compute_mismatch_metrics(e, configure().mismatch) | compute_replay_metrics(e)
    fresh = compute_mismatch_metrics(with_gaps([[two]], [0], [1]), configure().mismatch)
    assert {k: v for k, v in metrics.items() if k.startswith("mismatch/")} == fresh
    assert {k: v for k, v in metrics.items() if k.startswith("replay/")} == pytest.approx(
        {
            "replay/frac": 2 / 3,
            "replay/age_mean": 2.0,
            "replay/ratio_mean": (4 + 1 + 0.25) / 3,
            "replay/ratio_max": 4.0,
            "replay/kl": ((3 - four) + 0 + (-0.75 + four)) / 3,
            # All rewards are equal, so that none is above their mean.
            "replay/logprob_below": -2.0,
        }
    )
    sequence = compute_mismatch_metrics(e, configure(mismatch__level=RatioLevel.sequence).mismatch)
    assert sequence["replay/ratio_mean"] == pytest.approx((4 + 4 + 0.25) / 3)


def test_explained_variance_by_length_by_hand():
    # Lengths 1, 2, 2, 5: quartile limits 1.75, 2, 2.75, so 1 | 2, 2 | none | 5. A length's responses stay together.
    mask = torch.arange(5) < torch.tensor([1, 2, 2, 5])[:, None]
    returns = f64([[7, 0, 0, 0, 0], [0, 0, 0, 0, 0], [4, 4, 0, 0, 0], [0, 2, 0, 2, 1]])
    values = f64([[0, 0, 0, 0, 0], [1, 1, 0, 0, 0], [3, 3, 0, 0, 0], [0, 2, 0, 2, 1]])
    metrics = compute_critic_metrics(values, returns, returns, mask)
    # q1 has one return only; q2: G - V = -1, -1, 1, 1 of variance 1, G of variance 4
    assert {k: v for k, v in metrics.items() if "ev_length" in k} == pytest.approx(
        {"critic/ev_length_q2": 0.75, "critic/ev_length_q4": 1.0}
    )


def test_returns_that_differ_by_rounding_only_count_as_equal():
    # Every reward is 0.1: the Monte-Carlo returns are (0.1 - V) + V, which differ in the last digit.
    e = make_experience([0, 1], [5, 9], [0.1, 0.1], [False, False], 0)
    samples, metrics = compute_targets(e, configure(), 0.0)
    assert samples.returns[e.mask].unique().numel() > 1
    assert metrics["critic/explained_variance"] == 0.0
    assert not any("critic/ev_" in name or "corr" in name for name in metrics)


def test_calibration_by_hand():
    # One bin: |mean(1, 3) - mean(0, 6)| = 1. Deviations -1, 1 and -3, 3: slope 6/2, corr 1
    assert compute_calibration(f64([1, 3]), f64([0, 6])) == pytest.approx({"error": 1.0, "slope": 3.0, "corr": 1.0})
    # Two bins of 8: predictions 0 and 1, outcomes 0.25 and 0.5 on average; deviations -+1/2 and mean outcomes -+1/8
    predicted, outcomes = f64([1] * 8 + [0] * 8), f64([0, 1] * 4 + [0, 0, 0, 1] * 2)
    found = compute_calibration(predicted, outcomes)
    assert found == pytest.approx(
        {"error": (0.25 + 0.5) / 2, "slope": 0.25, "corr": 16 * 0.5 * 0.125 / math.sqrt(16 / 4 * 10 * 6 / 16)}
    )


def test_calibration_takes_the_first_and_the_middle_generated_token():
    # Row 0 generates positions 1, 2, 4 (middle: 2), row 1 only position 0 (first and middle).
    mask = torch.tensor([[0, 1, 1, 0, 1], [1, 0, 0, 0, 0]]).bool()
    nan = math.nan
    values = f64([[nan, 0.5, 0.25, nan, 0.75], [0.5, nan, nan, nan, nan]])
    outcomes = f64([[nan, 1, 1, nan, 1], [0, nan, nan, nan, nan]])
    metrics = compute_critic_metrics(values, outcomes, outcomes, mask)
    assert metrics["critic/calibration_error_first"] == 0.0  # both 0.5, outcomes 1 and 0
    assert "critic/calibration_slope_first" not in metrics
    assert metrics["critic/calibration_error_middle"] == pytest.approx(abs(0.375 - 0.5))
    assert metrics["critic/calibration_slope_middle"] == pytest.approx(-4.0)
    assert metrics["critic/calibration_corr_middle"] == pytest.approx(-1.0)


def test_calibration_is_against_the_rewards_that_followed_and_not_the_bootstrapped_return():
    e = make_experience([0, 1], [2, 2], [1.0, 0.0], [False, False], 0, holes=False)
    e = dataclasses.replace(e, values=f64([[0.9, 0.9], [0.1, 0.1]]))
    _, metrics = compute_targets(e, configure(lambda_critic=0.0), 0.0)
    assert metrics["critic/calibration_slope_first"] == pytest.approx(1 / 0.8)
    # The one-step return of the first state is the value of the second: it would look perfect.
    assert metrics["critic/ev_at_0_25"] == pytest.approx(1.0)


def test_the_critics_outcomes_have_the_turns_rewards():
    # With lambda 1 the middle state's outcome is its return: 0.7 and -0.2 after the first turns' 0.3 and 0.2.
    e = make_experience([0, 0], [4, 4], [1.0, 0.0], [False] * 2, 0, holes=False)
    values, turns = f64([[0.5, 0.4, 0.8, 0.7], [0.0] * 4]), f64([[0.0, 0.3, 0.0, 0.0], [0.0, 0.2, 0.0, 0.0]])
    metrics = compute_targets(dataclasses.replace(e, values=values, turn_rewards=turns), configure(), 0.0)[1]
    assert metrics["critic/calibration_slope_middle"] == pytest.approx((0.7 + 0.2) / 0.8)
    assert metrics["critic/calibration_slope_first"] == pytest.approx(1.0 / 0.5)


@some
@given(experiences(), st.lists(st.integers(0, 2), min_size=12, max_size=12))
def test_diagnostics_are_finite_and_do_not_depend_on_the_order_of_the_rows(e, ages):
    e = dataclasses.replace(e, ages=torch.tensor(ages[: len(e.groups)]))
    _, metrics = compute_targets(e, AlgoConfig(), 0.0)
    metrics |= compute_batch_metrics(e)
    far = dataclasses.replace(e, rollout_logprobs=e.old_logprobs - 500.0)
    assert all(math.isfinite(x) for x in (metrics | compute_targets(far, AlgoConfig(), 0.0)[1]).values()), metrics
    order = torch.arange(len(e.groups)).flip(0)
    fields = {
        f.name: getattr(e, f.name)[order] for f in dataclasses.fields(e) if isinstance(getattr(e, f.name), torch.Tensor)
    }
    turned = dataclasses.replace(e, sequences=e.sequences.select(order), **fields)
    _, found = compute_targets(turned, AlgoConfig(), 0.0)
    assert found | compute_batch_metrics(turned) == pytest.approx(metrics, abs=1e-9)


@some
@given(experiences())
def test_explained_variance_and_mismatch_by_position_equal_the_reference(e):
    rows = [[t for t, g in enumerate(m) if g] for m in e.mask.tolist()]
    metrics = compute_critic_metrics(e.values, e.old_logprobs, e.old_logprobs, e.mask)
    metrics |= compute_mismatch_metrics(e, AlgoConfig().mismatch)
    for quarter, name in enumerate(QUARTERS):
        at = [
            (i, t) for i, row in enumerate(rows) for n, t in enumerate(row) if quarter <= 4 * n / len(row) < quarter + 1
        ]
        values, returns = [e.values[x].item() for x in at], [e.old_logprobs[x].item() for x in at]
        if len(at) < 2:
            assert f"critic/ev_at_{name}" not in metrics
        else:
            expected = reference.explained_variance(values, returns)
            assert metrics[f"critic/ev_at_{name}"] == pytest.approx(expected, abs=1e-9)
        if at:
            gaps = [e.old_logprobs[x].item() - e.rollout_logprobs[x].item() for x in at]
            assert metrics[f"mismatch/logprob_gap_at_{name}"] == pytest.approx(reference.mean([abs(d) for d in gaps]))
            expected = reference.mean([math.exp(d) - 1 - d for d in gaps])
            assert metrics[f"mismatch/kl_at_{name}"] == pytest.approx(expected, abs=1e-9)


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
