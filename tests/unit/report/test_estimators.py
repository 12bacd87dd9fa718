"""pass@k, the majority and the interval of a mean: hand-computed, by enumeration, by simulation."""

import itertools
from math import prod
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from megarl.report.evaluation import Votes, compute_majority, compute_mean, compute_pass_at_k


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_mean_over_every_choice_of_k_responses(responses, data):
    k = data.draw(st.integers(1, len(responses)))
    passed = fmean(any(chosen) for chosen in itertools.combinations(responses, k))
    assert compute_pass_at_k(len(responses), sum(responses), k) == pytest.approx(passed, abs=1e-12)


@pytest.mark.parametrize(
    ("votes", "majority"),
    [
        *((Votes(3, (2,)), 1.0), (Votes(2, (3,)), 0.0), (Votes(2, (2,)), 1 / 2), (Votes(2, (2, 1, 2), 9), 1 / 3)),
        *((Votes(1), 1.0), (Votes(0, (), 4), 0.0), (Votes(0, (1,)), 0.0), (Votes(1, (), 3), 1.0)),
    ],
)
def test_the_majority_splits_ties_and_silence_has_no_vote(votes, majority):
    assert compute_majority(votes) == majority


@pytest.mark.parametrize("num_samples", [1, 4])
@pytest.mark.parametrize(("correct", "problems"), [(0, 30), (1, 30), (7, 40), (39, 40), (40, 40), (1, 1), (900, 1319)])
def test_the_interval_of_right_and_wrong_problems_is_wilsons(correct, problems, num_samples):
    """All samples of a problem alike: they say no more than one."""
    found = compute_mean([1.0] * correct + [0.0] * (problems - correct), num_samples)
    expected = binomtest(correct, problems).proportion_ci(0.95, method="wilson")
    assert found.value == correct / problems
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_the_interval_holds_the_mean_and_is_no_point_and_stays_within_0_and_1(counts):
    found = compute_mean([count / 4 for count in counts], 4)
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert found.high - found.low > 1e-3
    mirrored = compute_mean([1 - count / 4 for count in counts], 4)
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - found.high, 1 - found.low), abs=1e-9)


U_SHAPED = [(0.5, 0.5), (0.1, 0.1), (0.05, 0.95), (0.45, 0.05)]
"""Beta distributions of the chance to solve a problem: most are nearly always solved, or nearly never."""


def measure_coverage(tables, values, num_samples, truth):
    """The share of intervals that hold the truth. values: by number of correct responses."""
    intervals = (compute_mean([values[count] for count in row], num_samples) for row in tables.tolist())
    return fmean(each.low <= truth + 1e-12 and truth <= each.high + 1e-12 for each in intervals)


@pytest.mark.parametrize(
    ("num_problems", "num_samples", "alpha", "beta", "low", "high"),
    [
        *((size, n, *ab, 0.93, 0.985) for size in (30, 500) for n in (1, 16) for ab in U_SHAPED),
        # Problems that are neither mostly solved nor mostly unsolved.
        *((40, n, *ab, 0.94, 1.0) for n, ab in ((4, (2, 2)), (16, (2, 2)), (16, (0.5, 5)), (16, (20, 20)))),
    ],
)
def test_intervals_cover_what_they_promise(num_problems, num_samples, alpha, beta, low, high):
    """avg@n, and where most are solved or unsolved pass@n/2, of simulated sets."""
    generator = np.random.default_rng(1)
    tables = generator.binomial(num_samples, generator.beta(alpha, beta, (1000, num_problems)))
    shares = [count / num_samples for count in range(num_samples + 1)]
    assert low <= measure_coverage(tables, shares, num_samples, alpha / (alpha + beta)) <= high
    if (alpha, beta) in U_SHAPED:
        k = max(1, num_samples // 2)
        passed = [compute_pass_at_k(num_samples, count, k) for count in range(num_samples + 1)]
        # The mean of 1 - (1 - p)^k over the Beta distribution.
        truth = 1 - prod((beta + i) / (alpha + beta + i) for i in range(k))
        assert low <= measure_coverage(tables, passed, num_samples, truth) <= high


@pytest.mark.parametrize(("num_samples", "num_correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_counts_and_values_that_cannot_be_are_refused(num_samples, num_correct, k):
    with pytest.raises(ValueError, match=f"found {num_correct} correct of {num_samples} responses, k {k}"):
        compute_pass_at_k(num_samples, num_correct, k)
    for values in ([], [1.5], [float("nan")], [-0.1]):
        with pytest.raises(ValueError, match=r"values in \[0, 1\]"):
            compute_mean(values, 1)
