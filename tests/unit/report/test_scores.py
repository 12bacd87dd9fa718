"""Metrics of scores and episodes, and what is said of samples without a reward."""

import pytest

from megarl.report.evaluation import (
    LONGEST_REASON,
    TooManyFailuresError,
    check_failures,
    compute_heldout_metrics,
    compute_score_metrics,
    count_failed,
    describe_failures,
)
from megarl.types import FinishReason, Prompt, Response, Sample, Score, Turn


def build_sample(score, turns=(), reason=FinishReason.stop, length=6):
    response = Response([1] * length, "", [0.0] * length, [True] * length, [0] * length, reason, turns=turns)
    return Sample(Prompt("p", "", (1,), ""), response, score, 0)


def fail(reason):
    return build_sample(Score(0.0, False, failure=reason))


def test_metrics_are_means_over_the_samples_with_a_reward_and_sums_over_their_turns():
    calls = (Turn(0, 2, "", details={"tool_calls": 1.0}), Turn(3, 6, "", details={"tool_calls": 2.0, "errors": 1.0}))
    samples = [
        build_sample(Score(1.0, True, {"a": 1.0}), calls),
        build_sample(Score(0.0, False, {"a": 0.5}), (Turn(0, 6, ""),), FinishReason.max_turns, length=8),
        build_sample(Score(0.0, False, failure="lost"), calls, length=50),
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
    samples = [build_sample(Score(1.0, True)), *map(fail, reasons)]
    assert count_failed(samples) == 13
    text = describe_failures(samples)
    assert text == (
        r"13 of 14 responses have no reward: 5 x KeyError: 'x'; 3 x slow; 2 x a b\x1b[2J; 3 x other reasons"
    )
    assert describe_failures(samples[:1]) == ""
    assert len(describe_failures([fail("y" * 10_000)])) < LONGEST_REASON + 100


def test_more_failures_than_allowed_are_an_error_with_the_reasons():
    samples = [build_sample(Score(1.0, True))] * 9 + [fail("TimeoutError: 5 s")]
    check_failures(samples, 0.1)
    with pytest.raises(TooManyFailuresError) as caught:
        check_failures([*samples, fail("TimeoutError: 5 s")], 0.1)
    assert "2 of 11 responses have no reward: 2 x TimeoutError: 5 s" in str(caught.value)
    assert "reward.max_failed_frac=0.1 allows 1" in str(caught.value)
