"""Scored samples: pass@k, the majority and the interval of a mean, hand-computed, by enumeration, by simulation; the
result of a set, its row in the table and its JSON; metrics of scores, and what is said of samples without a reward.
"""

import itertools
import json
from dataclasses import replace
from math import prod
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from megarl.report.evaluation import (
    LONGEST_REASON,
    TooManyFailuresError,
    Votes,
    check_failures,
    compute_heldout_metrics,
    compute_majority,
    compute_mean,
    compute_pass_at_k,
    compute_score_metrics,
    count_failed,
    describe_failures,
    format_response,
    format_table,
    summarize_set,
    write_evaluation,
)
from megarl.types import FinishReason, Prompt, Response, Sample, Score, Turn


def build_sample(problem: str, answer: str | None, *, correct: bool = False, length: int = 2, cut: bool = False):
    prompt = Prompt(problem, f"{problem}?", (1,), "7")
    reason = FinishReason.length if cut else FinishReason.stop
    response = Response((1,) * length, str(answer), (0.0,) * length, (True,) * length, (0,) * length, reason)
    return Sample(prompt, response, Score(float(correct), correct, {}, answer), 0)


SAMPLES = [
    build_sample("p", "7", correct=True),
    build_sample("p", "7.0", correct=True),
    build_sample("p", "8"),
    build_sample("p", None, length=6, cut=True),
    build_sample("q", "1"),
    build_sample("q", "1"),
    build_sample("q", "2"),
    build_sample("q", "7", correct=True),
]


def test_a_set_is_summarized_by_the_means_of_its_problems_and_written_whole(tmp_path):
    result = summarize_set("s", SAMPLES, (2, 4), reads_answers=True)
    values = {name: estimate.value for name, estimate in result.estimates.items()}
    expected = {"avg@4": (0.5 + 0.25) / 2, "pass@2": (5 / 6 + 0.5) / 2, "pass@4": 1.0, "maj@4": 0.5}
    assert values == pytest.approx(expected)
    assert (result.mean_reward, result.mean_response_tokens) == (3 / 8, 20 / 8)
    assert (result.truncated_frac, result.unread_frac) == (1 / 8, 1 / 8)
    # Correct answers vote together, however they are written, and silent ones do not.
    assert result.problems == {"p": Votes(2, (1,), 1), "q": Votes(1, (2, 1))}
    write_evaluation(tmp_path / "evaluation.json", [result], {"checkpoint": "/model"})
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert (found["checkpoint"], found["sets"]["s"]["num_problems"]) == ("/model", 2)
    assert found["sets"]["s"]["estimates"]["avg@4"]["value"] == 0.375
    assert found["sets"]["s"]["problems"]["p"] == {"num_correct": 2, "wrong": [1], "num_silent": 1}
    with pytest.raises(ValueError, match=r"s: found problems with \[3, 4\] samples"):
        summarize_set("s", SAMPLES[:-1], (), reads_answers=True)


def read_table(results):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in format_table(results).splitlines()]


def test_the_table_has_a_row_per_set_and_a_dash_where_a_set_has_no_number():
    results = [
        summarize_set("math", SAMPLES, (2,), reads_answers=True),
        summarize_set("own", SAMPLES, (2,), reads_answers=False),
    ]
    rows = read_table(results)
    assert rows[0] == ["set", "problems", "avg@4", "pass@2", "maj@4", "reward", "tokens", "truncated", "no answer"]
    assert rows[2][:2] == ["math", "2"]
    assert rows[2][2].startswith("37.5 [")
    assert rows[2][5:] == ["0.375", "2", "12.5", "12.5"]
    # The second verifier reads no answers.
    assert rows[3][4] == rows[3][8] == "-"
    assert len({len(line) for line in format_table(results).splitlines()}) == 1


def test_a_response_without_a_reward_counts_as_wrong_without_a_vote_and_is_shown():
    lost = replace(SAMPLES[0], score=Score(0.0, False, failure="TimeoutError: 5 s"))
    result = summarize_set("s", [lost, *SAMPLES[1:]], (2,), reads_answers=True)
    assert (result.failed_frac, result.unread_frac, result.mean_reward) == (1 / 8, 1 / 8, 2 / 8)
    assert result.problems["p"] == Votes(1, (1,), 2)
    assert result.estimates["avg@4"].value == (0.25 + 0.25) / 2
    rows = read_table([result])
    assert (rows[0][-1], rows[2][-1]) == ("no reward", "12.5")
    assert json.loads(format_response("s", 0, lost))["failure"] == "TimeoutError: 5 s"


def test_a_conversation_is_shown_by_its_turns_and_measured_by_its_generated_tokens():
    generated = [True, True, False, False, True, False]
    turns = [Turn(0, 2, "Is it 5?", 0.25), Turn(4, 5, "3")]
    response = Response([7, 8, 9, 10, 11, 12], "3", [0.0] * 6, generated, [0] * 6, FinishReason.max_turns, turns=turns)
    sample = replace(SAMPLES[0], response=response)
    result = summarize_set("s", [sample], (), reads_answers=False)
    assert (result.mean_response_tokens, result.mean_turns, result.truncated_frac) == (3.0, 2.0, 0.0)
    rows = read_table([result])
    assert rows[2][rows[0].index("turns")] == "2.0"
    assert "no reward" not in rows[0]
    found = json.loads(format_response("s", 0, sample, lambda tokens: f"<{tokens}>"))
    assert found["num_tokens"] == 3
    assert found["turns"] == [
        {"action": "Is it 5?", "observation": "<[9, 10]>", "reward": 0.25},
        {"action": "3", "observation": "<[12]>", "reward": 0.0},
    ]
    assert "turns" not in json.loads(format_response("s", 0, SAMPLES[0]))


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


def build_scored(score, turns=(), reason=FinishReason.stop, length=6):
    response = Response([1] * length, "", [0.0] * length, [True] * length, [0] * length, reason, turns=turns)
    return Sample(Prompt("p", "", (1,), ""), response, score, 0)


def fail(reason):
    return build_scored(Score(0.0, False, failure=reason))


def test_metrics_are_means_over_the_samples_with_a_reward_and_sums_over_their_turns():
    calls = (Turn(0, 2, "", details={"tool_calls": 1.0}), Turn(3, 6, "", details={"tool_calls": 2.0, "errors": 1.0}))
    samples = [
        build_scored(Score(1.0, True, {"a": 1.0}), calls),
        build_scored(Score(0.0, False, {"a": 0.5}), (Turn(0, 6, ""),), FinishReason.max_turns, length=8),
        build_scored(Score(0.0, False, failure="lost"), calls, length=50),
    ]
    environment = {
        **{"environment/tool_calls": 1.5, "environment/errors": 0.5, "environment/turns_mean": 1.5},
        **{"environment/max_turns_frac": 0.5, "environment/tokens_mean": 7.0},
    }
    scores = {"reward/a": 0.75, "reward/correct": 0.5}
    assert compute_score_metrics(samples, with_environment=False) == scores
    assert compute_score_metrics(samples, with_environment=True) == scores | environment
    assert compute_score_metrics(samples[2:], with_environment=True) == {}
    # Of the held-out prompts a response without a reward counts as wrong.
    assert compute_heldout_metrics(samples, with_environment=True) == {
        **{f"heldout/{name}": value for name, value in environment.items()},
        **{"heldout/a": 0.75, "heldout/correct": 1 / 3, "heldout/failed_frac": 1 / 3, "reward/heldout": 1 / 3},
    }


def test_the_most_frequent_reasons_are_named_with_their_counts():
    reasons = ["slow"] * 3 + ["KeyError: 'x'"] * 5 + ["a\nb\x1b[2J", "other"] * 2 + ["rare"]
    samples = [build_scored(Score(1.0, True)), *map(fail, reasons)]
    assert count_failed(samples) == 13
    text = describe_failures(samples)
    assert text == (
        r"13 of 14 responses have no reward: 5 x KeyError: 'x'; 3 x slow; 2 x a b\x1b[2J; 3 x other reasons"
    )
    assert describe_failures(samples[:1]) == ""
    assert len(describe_failures([fail("y" * 10_000)])) < LONGEST_REASON + 100


def test_more_failures_than_allowed_are_an_error_with_the_reasons():
    samples = [build_scored(Score(1.0, True))] * 9 + [fail("TimeoutError: 5 s")]
    check_failures(samples, 0.1)
    with pytest.raises(TooManyFailuresError) as caught:
        check_failures([*samples, fail("TimeoutError: 5 s")], 0.1)
    assert "2 of 11 responses have no reward: 2 x TimeoutError: 5 s" in str(caught.value)
    assert "reward.max_failed_frac=0.1 allows 1" in str(caught.value)
