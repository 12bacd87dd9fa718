"""Rewards by a rule: texts, numbers, form, length, letters, and the environment's own."""

from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_cases import build_prompt, build_response, build_reward

from megarl.config.errors import ConfigError
from megarl.config.schema.task import (
    AdditionRewardConfig,
    EnvironmentRewardConfig,
    ExactRewardConfig,
    FormatRewardConfig,
    LengthRewardConfig,
    LetterCountRewardConfig,
    MathRewardConfig,
    NumericRewardConfig,
    WeightedRewardConfig,
)
from megarl.task.reward import RewardFailedError, find_last_number, format_number, parse_number, read_tests
from megarl.task.scorer import build_scorer
from megarl.types import FinishReason, Response, Turn


def build_turns(rewards: tuple[float, ...]) -> Response:
    """One token a turn."""
    turns, count = [Turn(i, i + 1, "4", reward) for i, reward in enumerate(rewards)], len(rewards)
    return Response([1] * count, "4", [0.0] * count, [True] * count, [0] * count, FinishReason.stop, turns=turns)


def build_long(length: int) -> Response:
    """Two tokens of an observation do not count."""
    generated, size = [True] * length + [False] * 2, length + 2
    return Response([1] * size, "", [0.0] * size, generated, [0] * size, FinishReason.stop)


def score_several(config: Any, response: str, *answers: str) -> tuple[bool, str | None]:
    """Whether it is correct, and the answer that was read."""
    prompt = replace(build_prompt(answers[0] if answers else ""), references=answers[:] if len(answers) > 1 else ())
    score = build_reward(config)(prompt, build_response(response))
    return score.correct, score.answer


@pytest.mark.parametrize(
    ("config", "response", "answers", "correct"),
    [
        *[(ExactRewardConfig(), text, ("Ann", "A. B."), correct) for text, correct in (("ann", True), ("a. b", True))],
        (ExactRewardConfig(), "Bob", ("Ann", "A. B."), False),
        *[(NumericRewardConfig(relative_tolerance=0.1), text, ("10", "100"), correct)
          for text, correct in (("11", True), ("109", True), ("12", False))],
        *[(MathRewardConfig(), f"\\boxed{{{text}}}", ("x+1", "5"), correct)
          for text, correct in (("1+x", True), ("5", True), ("6", False))],
    ],
)  # fmt: skip
def test_of_several_answers_any_is_right(config: Any, response: str, answers: tuple[str, ...], correct: bool) -> None:
    assert score_several(config, response, *answers)[0] == correct
    assert score_several(config, response, *reversed(answers))[0] == correct


@pytest.mark.parametrize("config", [ExactRewardConfig(), NumericRewardConfig(), MathRewardConfig()])
def test_a_reward_that_reads_an_answer_refuses_data_without_one(config: Any) -> None:
    with pytest.raises(ValueError, match=r"no answer found .*; reward=\w+ needs one, whose column data\.answer_field"):
        score_several(config, "1")


def test_several_statements_are_all_run() -> None:
    statements = ("assert f(1) == 1", "assert f(2) == 2")
    assert read_tests(replace(build_prompt(statements[0]), references=statements)) == ([], [*statements])


build = cache(lambda kind, options: build_reward(kind(**dict(options))))
SUM_AT_1, SUM_AT_HALF = [(EnvironmentRewardConfig, (("correct_at", at),)) for at in (1.0, 0.5)]
EXACT, FORM, LETTERS = (ExactRewardConfig, ()), (FormatRewardConfig, ()), (LetterCountRewardConfig, ())
LENGTH = (LengthRewardConfig, (("min_length", 10), ("max_length", 20), ("falloff", 10)))


def numeric(**options):
    return NumericRewardConfig, tuple(options.items())


@pytest.mark.parametrize(
    ("kind", "answer", "response", "reward", "correct", "details"),
    [
        # The rewards of the turns are added elsewhere.
        *[(SUM_AT_1, "4", build_turns(it), 0.0, True, {}) for it in ((0.0, 1.0), (0.5, 0.5))],
        *[(SUM_AT_1, "4", build_turns(it), 0.0, False, {}) for it in ((0.0,), (2.0, -1.5), ())],
        *[(SUM_AT_HALF, "4", build_turns((it,)), 0.0, it >= 0.5, {}) for it in (0.4, 0.5, 0.6)],
        *[(EXACT, *it, 1.0, True, {}) for it in (("Paris", "  paris. "), ("New  York", "new york"), (".", ""))],
        *[(EXACT, *it, 0.0, False, {}) for it in (("Paris", "Paris, France"), ("3.5", "35"), ("a", ""))],
        *[(FORM, "unread", text, 1.0, True, {}) for text in ("<think>a\nb</think>\n<answer>c</answer>",
                                                            " <think></think><answer></answer>\n")],
        *[(FORM, "unread", text, 0.0, False, {}) for text in ("Well: <think>a</think><answer>b</answer>",
                                                             "<think>a</think>", "")],
        *[(numeric(**options), answer, text, float(correct), correct, {"format": 1.0})
          for options, answer, text, correct in [
              ({}, "0.3", "0.1 + 0.2 = 0.30", True),
              ({}, "0.3", "0.30000000000000004", False),
              ({}, "1,000", "1000", True),
              ({"tolerance": 0.1}, "3", "3.1", True),
              ({"tolerance": 0.1}, "3", "3.1000001", False),
              ({"relative_tolerance": 0.01}, "-200", "-198", True),
              ({"relative_tolerance": 0.01}, "-200", "-197.9", False),
              ({"relative_tolerance": 0.01, "tolerance": 5.0}, "200", "195", True)]],
        (numeric(), "0.3", "none", 0.0, False, {"format": 0.0}),
        *[(LENGTH, "", build_long(length), reward, 10 <= length <= 20, {"tokens": length})
          for length, reward in [(0, 0.0), (5, 0.5), (10, 1.0), (15, 1.0), (20, 1.0), (25, 0.5), (29, 0.1), (99, 0.0)]],
        *[((AdditionRewardConfig, ()), "85", text, float(form and right), bool(form and right),
           {"format": form, "number": right})
          for text, form, right in [
              ("85", 1, 1), (" 85.\n", 1, 1), ("085", 1, 1), ("86", 1, 0), ("-85", 1, 0), ("The answer is 85.", 0, 1),
              ("47 + 38 = 85", 0, 1), ("85 is 47 + 38", 0, 0), ("", 0, 0), ("eighty-five", 0, 0), ("8 5", 0, 0),
              ("8.5", 0, 0), ("٨٥", 0, 0), ("9" * 100_000, 1, 0)]],
        # A share of letters times the score of the length: 1 within the tolerance of 1.25; outside it falls linearly in
        # the logarithm, alike for too short and too long: 16 is off by 2, log(2 / 1.25) / log(4) = 0.33904.
        *[(LETTERS, answer, build_response(text, reason), letters * length, letters * length >= 0.9,
           {"letters": letters, "length": length})
          for reason in (FinishReason.stop, FinishReason.length)  # Also of a response cut at the limit.
          for answer, text, letters, length in [
              ("b37", "b" * 37, 1.0, 1.0), ("b37", "b" * 30, 1.0, 1.0), ("b37", "b" * 46, 1.0, 1.0),
              ("b8", "b" * 10, 1.0, 1.0), ("b8", "b" * 16, 1.0, 0.66096), ("b8", "b" * 25, 1.0, 0.33904),
              ("b8", "b" * 40, 1.0, 0.0), ("b8", "b" * 50, 1.0, 0.0), ("c40", "c" * 20, 1.0, 0.66096),
              ("c10", "c" * 20, 1.0, 0.66096), ("b4", "bbxb", 0.75, 1.0), ("b4", "", 0.0, 0.0)]],
    ],
)  # fmt: skip
def test_a_rule_scores_a_response(kind, answer, response, reward, correct, details):
    response = build_response(response) if isinstance(response, str) else response
    score = build(*kind)(build_prompt(answer), response)
    assert (score.reward, score.correct) == (pytest.approx(reward, abs=1e-5), correct)
    assert score.details == pytest.approx(details, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "answer", "message"),
    [
        ((AdditionRewardConfig, ()), "b37", r"prompt 'p1'.*'b37'"),
        (numeric(), "b37", r"prompt 'p1'.*'b37'"),
        *[(LETTERS, answer, r"prompt 'p1'.*data=letter_count") for answer in ("37", "b", "b0", "bb3", "")],
    ],
)
def test_an_answer_of_another_task_is_an_error_that_names_the_prompt(kind, answer, message):
    with pytest.raises(ValueError, match=message):
        build(*kind)(build_prompt(answer), build_response("37"))


@pytest.mark.parametrize(
    ("read", "text", "number"),
    [
        *[(parse_number, *row) for row in (
            ("85", 85), ("−85", -85), ("+85", 85), (".5", Fraction(1, 2)), ("1,234,567.5", Fraction(2469135, 2)),
            ("$1,000", 1000), ("50%", 50), ("3/4", Fraction(3, 4)), ("2.5E-2", Fraction(1, 40)), (" 7 ", 7),
            *[(text, None) for text in ("12,34", "1/0", "seven", "", "1 2", "٨٥", "1e99999", "9" * 1001, "nan")])],
        # The last number of a text counts.
        *[(find_last_number, *row) for row in (
            ("47 + 38 = 85", 85), ("It is 85.", 85), ("first 3.5, then -2", -2), ("10-3", 3), ("a list: 1,2", 2),
            ("$1,234.50!", Fraction(2469, 2)), ("85kg", 85), ("x2 and nothing", None), ("", None),
            ("3/4 of it", Fraction(3, 4)), ("50% of 80", 80), ("5/0", None))],
    ],
)  # fmt: skip
def test_a_number_is_read_exactly(read, text, number):
    assert read(text) == number


@given(st.fractions())
def test_equal_numbers_have_one_text_that_reads_as_the_number(number):
    assert parse_number(format_number(number)) == number


def test_a_pattern_that_does_not_end_is_a_failure_of_the_pattern():
    reward = build_reward(FormatRewardConfig(pattern=r"(a+)+b", timeout_s=0.5))
    with pytest.raises(RewardFailedError, match=r"longer than reward\.timeout_s=0\.5 s"):
        reward(build_prompt(""), build_response("a" * 100))
    assert reward(build_prompt(""), build_response("aab")).correct


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (FormatRewardConfig(pattern="(a"), r"^reward\.pattern: found '\(a'; not a regular expression"),
        (WeightedRewardConfig(parts={"form": {"kind": "format", "pattern": "("}}), r"^reward\.parts\.form\.pattern: "),
        (LengthRewardConfig(min_length=9, max_length=8), r"reward\.min_length: found 9; it must be at most reward"),
    ],
)  # fmt: skip
def test_a_rule_that_is_none_is_named(config, message):
    with pytest.raises(ConfigError, match=message):
        build_scorer(config)
