"""Rewards by a rule: texts, numbers, form, length, letters, and the environment's own."""

from fractions import Fraction

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
    NumericRewardConfig,
)
from megarl.task.reward import RewardFailedError
from megarl.task.rule_rewards import find_last_number, format_number, parse_number
from megarl.types import FinishReason, Response, Score, Turn


def build_turns(rewards: tuple[float, ...]) -> Response:
    """One token a turn."""
    turns, count = [Turn(i, i + 1, "4", reward) for i, reward in enumerate(rewards)], len(rewards)
    return Response([1] * count, "4", [0.0] * count, [True] * count, [0] * count, FinishReason.stop, turns=turns)


@pytest.mark.parametrize(
    ("rewards", "correct_at", "correct"),
    [
        *[((0.0, 1.0), 1.0, True), ((0.5, 0.5), 1.0, True), ((0.0,), 1.0, False), ((2.0, -1.5), 1.0, False)],
        *[((), 1.0, False), ((0.4,), 0.5, False), ((0.5,), 0.5, True), ((0.6,), 0.5, True)],
    ],
)
def test_the_environments_reward_adds_nothing_and_is_correct_from_a_sum_on(rewards, correct_at, correct):
    reward = build_reward(EnvironmentRewardConfig(correct_at=correct_at))
    assert reward(build_prompt("4"), build_turns(rewards)) == Score(0.0, correct)


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("Paris", "  paris. ", True),
        ("New  York", "new york", True),
        ("Paris", "Paris, France", False),
        ("3.5", "35", False),
        ("", "", True),
        ("a", "", False),
    ],
)
def test_exact_compares_normalised_texts(answer, text, expected):
    result = build_reward(ExactRewardConfig())(build_prompt(answer), build_response(text))
    assert (result.reward, result.correct) == (float(expected), expected)


@pytest.mark.parametrize(
    ("text", "well_formed", "right"),
    [
        ("85", 1, 1),
        (" 85.\n", 1, 1),
        ("085", 1, 1),
        ("86", 1, 0),
        ("-85", 1, 0),
        ("The answer is 85.", 0, 1),
        ("47 + 38 = 85", 0, 1),
        ("85 is 47 + 38", 0, 0),
        ("", 0, 0),
        ("eighty-five", 0, 0),
        ("8 5", 0, 0),
        ("8.5", 0, 0),
        ("٨٥", 0, 0),
        ("9" * 100_000, 1, 0),
    ],
)
def test_addition_counts_wrong_format_and_wrong_number_apart(text, well_formed, right):
    result = build_reward(AdditionRewardConfig())(build_prompt("85"), build_response(text))
    assert result.details == {"format": well_formed, "number": right}
    assert result.correct == (well_formed and right)
    assert result.reward == float(result.correct)


def test_addition_names_a_prompt_whose_answer_is_no_integer():
    with pytest.raises(ValueError, match=r"prompt 'p1'.*'b37'"):
        build_reward(AdditionRewardConfig())(build_prompt("b37"), build_response("37"))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("85", 85), ("-85", -85), ("−85", -85), ("+85", 85), ("0.10", Fraction(1, 10)), (".5", Fraction(1, 2)),
        ("1,234,567.5", Fraction(2469135, 2)), ("$1,000", 1000), ("50%", 50), ("3/4", Fraction(3, 4)),
        ("1e3", 1000), ("2.5E-2", Fraction(1, 40)), (" 7 ", 7), ("12,34", None), ("1/0", None), ("seven", None),
        ("", None), ("1 2", None), ("٨٥", None), ("1e99999", None), ("9" * 1001, None), ("nan", None),
    ],
)  # fmt: skip
def test_a_number_is_read_exactly(text, number):
    assert parse_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("47 + 38 = 85", 85), ("It is 85.", 85), ("first 3.5, then -2", -2), ("10-3", 3), ("a list: 1,2", 2),
        ("$1,234.50!", Fraction(2469, 2)), ("85kg", 85), ("x2 and nothing", None), ("", None),
        ("3/4 of it", Fraction(3, 4)),
        ("50% of 80", 80), ("5/0", None),
    ],
)  # fmt: skip
def test_the_last_number_of_a_text_counts(text, number):
    assert find_last_number(text) == number


@given(st.fractions())
def test_equal_numbers_have_one_text_that_reads_as_the_number(number):
    assert parse_number(format_number(number)) == number


@pytest.mark.parametrize(
    ("options", "answer", "text", "correct"),
    [
        ({}, "0.3", "0.1 + 0.2 = 0.30", True),
        ({}, "0.3", "0.30000000000000004", False),
        ({}, "1,000", "1000", True),
        ({"tolerance": 0.1}, "3", "3.1", True),
        ({"tolerance": 0.1}, "3", "3.1000001", False),
        ({"relative_tolerance": 0.01}, "-200", "-198", True),
        ({"relative_tolerance": 0.01}, "-200", "-197.9", False),
        ({"relative_tolerance": 0.01, "tolerance": 5.0}, "200", "195", True),
    ],
)
def test_a_number_within_the_tolerance_is_right(options, answer, text, correct):
    score = build_reward(NumericRewardConfig(**options))(build_prompt(answer), build_response(text))
    assert (score.reward, score.correct, score.details) == (float(correct), correct, {"format": 1.0})


@pytest.fixture(scope="module")
def think_answer():
    return build_reward(FormatRewardConfig())


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("<think>a\nb</think>\n<answer>c</answer>", True),
        (" <think></think><answer></answer>\n", True),
        ("Well: <think>a</think><answer>b</answer>", False),
        ("<think>a</think>", False),
        ("", False),
    ],
)
def test_the_whole_response_has_the_form(think_answer, text, matches):
    score = think_answer(build_prompt("unread"), build_response(text))
    assert (score.reward, score.correct) == (float(matches), matches)


def test_a_pattern_that_does_not_end_is_a_failure_of_the_pattern():
    reward = build_reward(FormatRewardConfig(pattern=r"(a+)+b", timeout_s=0.5))
    with pytest.raises(RewardFailedError, match=r"longer than reward\.timeout_s=0\.5 s"):
        reward(build_prompt(""), build_response("a" * 100))
    assert reward(build_prompt(""), build_response("aab")).correct


def test_a_pattern_that_is_none_is_named():
    with pytest.raises(ConfigError, match=r"reward\.pattern: found '\(a'; not a regular expression"):
        build_reward(FormatRewardConfig(pattern="(a"))


@pytest.mark.parametrize(
    ("length", "reward"),
    [(0, 0.0), (5, 0.5), (10, 1.0), (15, 1.0), (20, 1.0), (25, 0.5), (29, 0.1), (30, 0.0), (99, 0.0)],
)
def test_the_length_score_falls_linearly_outside_of_the_range(length, reward):
    # Two tokens of an observation do not count.
    generated = [True] * length + [False] * 2
    response = Response([1] * len(generated), "", [0.0] * len(generated), generated, [0] * len(generated),
                        FinishReason.stop)  # fmt: skip
    score = build_reward(LengthRewardConfig(min_length=10, max_length=20, falloff=10))(build_prompt(""), response)
    assert score.reward == pytest.approx(reward)
    assert (score.correct, score.details) == (10 <= length <= 20, {"tokens": length})


def test_an_empty_range_of_lengths_is_named():
    with pytest.raises(ConfigError, match=r"reward\.min_length: found 9; it must be at most reward\.max_length \(8\)"):
        build_reward(LengthRewardConfig(min_length=9, max_length=8))


REWARD = build_reward(LetterCountRewardConfig())


def score_letters(answer: str, text: str, finish_reason: FinishReason = FinishReason.stop):
    return REWARD(build_prompt(answer), build_response(text, finish_reason))


@pytest.mark.parametrize(
    ("answer", "text", "letters", "length"),
    [
        ("b37", "b" * 37, 1.0, 1.0),
        # Within the tolerance of 1.25
        ("b37", "b" * 30, 1.0, 1.0),
        ("b37", "b" * 46, 1.0, 1.0),
        ("b8", "b" * 10, 1.0, 1.0),
        # Outside it falls linearly in the logarithm: 16 is off by 2, log(2 / 1.25) / log(4) = 0.33904.
        ("b8", "b" * 16, 1.0, 0.66096),
        ("b8", "b" * 25, 1.0, 0.33904),
        ("b8", "b" * 40, 1.0, 0.0),
        ("b8", "b" * 50, 1.0, 0.0),
        # Too short and too long by one factor score alike.
        ("c40", "c" * 20, 1.0, 0.66096),
        ("c10", "c" * 20, 1.0, 0.66096),
        ("b4", "bbxb", 0.75, 1.0),
        ("b4", "", 0.0, 0.0),
    ],
)
@pytest.mark.parametrize("finish_reason", [FinishReason.stop, FinishReason.length])
def test_letters_count_as_a_share_times_the_score_of_the_length(answer, text, letters, length, finish_reason):
    """Also of a response cut at the limit, with the length that it has."""
    result = score_letters(answer, text, finish_reason)
    assert result.details == pytest.approx({"letters": letters, "length": length}, abs=1e-5)
    assert result.reward == pytest.approx(letters * length, abs=1e-5)
    assert result.correct == (result.reward >= 0.9)


@pytest.mark.parametrize("answer", ["37", "b", "b0", "bb3", ""])
def test_an_answer_of_another_task_is_an_error_that_names_the_prompt(answer):
    with pytest.raises(ValueError, match=r"prompt 'p1'.*data=letter_count"):
        score_letters(answer, "b")
