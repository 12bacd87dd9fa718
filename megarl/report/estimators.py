"""Exact avg@k, pass@k and maj@k of one problem, and the mean over problems with its confidence interval."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb, sqrt
from statistics import NormalDist, fmean, variance

PRIOR_WEIGHT = 2.0
"""Problems' worth of a design effect of 1 in its estimate: the smallest whole number with which simulated intervals
of 30 and more problems cover what they promise for chances from U-shaped distributions, also strongly skewed ones."""


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Votes:
    """The number of responses to one problem by answer."""

    num_correct: int
    """Responses with a correct answer; they all vote for the same answer, however it is written"""
    wrong: tuple[int, ...] = ()
    """Responses for each different wrong answer, each 1 or more"""
    num_silent: int = 0
    """Responses without a readable answer; they are wrong and have no vote"""

    @property
    def num_samples(self) -> int:
        return self.num_correct + sum(self.wrong) + self.num_silent


def compute_pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that one or more of `k` responses is correct: 1 - C(n - c, k) / C(n, k).

    The unbiased estimate from n responses of which c are correct; Chen et al. 2021, 2107.03374, equation 1.
    Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    _check_counts(num_samples, num_correct, k)
    return float(1 - Fraction(comb(num_samples - num_correct, k), comb(num_samples, k)))


def compute_maj_at_k(votes: Votes, k: int) -> float:
    """Probability that the answer most frequent among `k` of the responses is correct; unbiased like pass@k.

    The mean over all C(n, k) choices of k responses, computed by counting them. Ties are split: a correct answer tied
    with one wrong answer counts one half. No vote at all is wrong. Raises ValueError as `compute_pass_at_k`.
    """
    _check_counts(votes.num_samples, votes.num_correct, k)
    total = Fraction(0)
    for most in range(1, min(votes.num_correct, k) + 1):
        ways = _count_ways(votes, k - most, most)
        total += comb(votes.num_correct, most) * sum(Fraction(count, 1 + tied) for tied, count in ways.items())
    return float(total / comb(votes.num_samples, k))


def _count_ways(votes: Votes, num_chosen: int, most: int) -> dict[int, int]:
    """The number of ways to choose `num_chosen` incorrect responses so that no wrong answer has more than `most` votes,
    by the number of wrong answers with exactly `most`.
    """
    num_free = votes.num_silent + sum(count for count in votes.wrong if count < most)
    table = {(0, 0): 1}
    for count in votes.wrong:
        if count < most:
            continue
        longer: dict[tuple[int, int], int] = defaultdict(int)
        for (chosen, tied), ways in table.items():
            for taken in range(min(most, num_chosen - chosen) + 1):
                longer[chosen + taken, tied + (taken == most)] += ways * comb(count, taken)
        table = longer
    found: dict[int, int] = defaultdict(int)
    for (chosen, tied), ways in table.items():
        found[tied] += ways * comb(num_free, num_chosen - chosen)
    return found


def compute_mean(values: Sequence[float], num_samples: int, confidence: float) -> Estimate:
    """The mean over problems of values in [0, 1], and its interval over problems.

    The interval is Wilson's (1927) for a proportion, with N / d in place of the N problems, where d is the design
    effect of cluster sampling (Kish 1965): the variance over problems divided by p (1 - p). With one response per
    problem d is 1, and this is Wilson's interval itself. With n responses d is 1 / n + (1 - 1 / n) r for the
    correlation r within a problem, so its estimate is clamped to [1 / n, 1].

    Where nearly all problems are 0, or nearly all 1, few of them tell what d is, and an estimate that is too small
    comes together with a mean that is too far out: with the plain estimate 95% intervals of 30 problems cover down to
    85%. So d is the average of the estimate with weight 4 N p (1 - p), about the number of problems that tell, and of
    1, its upper bound, with weight 2. Where all values are 0, or all 1, d is 1. Unlike a bootstrap or t-interval it
    does not shrink to a point for 0 of 30. Problems count as a random sample of problems like them.

    num_samples: n. Raises ValueError for no values, one outside [0, 1], or a confidence outside (0, 1).
    """
    if not values or not all(0 <= value <= 1 for value in values):
        raise ValueError(f"one or more values in [0, 1] were expected; found {list(values)[:5]}")
    if num_samples < 1 or not 0 < confidence < 1:
        raise ValueError(f"found num_samples {num_samples} (1 or more), confidence {confidence} (in (0, 1))")
    mean = fmean(values)
    spread = mean * (1 - mean)
    effect = 1.0
    if len(values) > 1 and spread > 0:
        weight = 4 * len(values) * spread
        effect = min(1.0, max(variance(values) / spread, 1 / num_samples))
        effect = (weight * effect + PRIOR_WEIGHT) / (weight + PRIOR_WEIGHT)
    size = len(values) / effect
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    center = (mean + z * z / (2 * size)) / (1 + z * z / size)
    reach = z / (1 + z * z / size) * sqrt(spread / size + z * z / (4 * size * size))
    # Rounding must not put the mean outside the interval: at 0 and 1 a bound is the mean itself.
    return Estimate(mean, min(mean, max(0.0, center - reach)), max(mean, min(1.0, center + reach)))


def _check_counts(num_samples: int, num_correct: int, k: int) -> None:
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"found {num_correct} correct of {num_samples} responses, k {k}; k must be 1 to {num_samples}")
