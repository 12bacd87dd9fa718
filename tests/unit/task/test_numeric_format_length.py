"""The verifiers numeric, format and length."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_cases import build_prompt, build_response, build_reward

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema.reward import FormatRewardConfig, LengthRewardConfig, NumericRewardConfig
from megarl.task.reward import RewardFailedError
from megarl.task.rule_rewards import find_last_number, format_number, parse_number
from megarl.types import FinishReason, Response


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


def test_a_long_response_of_digits_is_read_in_linear_time():
    assert find_last_number("1," * 100_000 + "9" * 100_000 + " 5") == 5


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


def test_a_response_without_a_number_is_wrong():
    score = build_reward(NumericRewardConfig())(build_prompt("1"), build_response("none"))
    assert (score.reward, score.details, score.answer) == (0.0, {"format": 0.0}, None)


def test_a_pattern_says_where_the_number_is():
    reward = build_reward(NumericRewardConfig(pattern=r"<answer>(.*?)</answer>"))
    right = reward(build_prompt("85"), build_response("<answer>1</answer> <answer> 85 </answer> of 90"))
    wrong = reward(build_prompt("85"), build_response("85"))
    assert (right.correct, right.answer, wrong.details) == (True, "85", {"format": 0.0})


def test_an_answer_that_is_no_number_is_named():
    with pytest.raises(ValueError, match=r"prompt 'p1': answer 'Paris' found; reward=numeric"):
        build_reward(NumericRewardConfig())(build_prompt("Paris"), build_response("1"))


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


def test_a_part_suffices_anywhere():
    reward = build_reward(FormatRewardConfig(pattern=r"\bstep \d", anywhere=True))
    texts = ("In step 1 we", "no steps")
    assert [reward(build_prompt(""), build_response(text)).correct for text in texts] == [True, False]


def test_a_pattern_that_does_not_end_is_a_failure_of_the_pattern():
    reward = build_reward(FormatRewardConfig(pattern=r"(a+)+b", timeout_s=0.5))
    with pytest.raises(RewardFailedError, match=r"longer than reward\.timeout_s=0\.5 s"):
        reward(build_prompt(""), build_response("a" * 100))
    assert reward(build_prompt(""), build_response("aab")).correct


@pytest.mark.parametrize("config", [FormatRewardConfig(pattern="(a"), NumericRewardConfig(pattern="(a")])
def test_a_pattern_that_is_none_is_named(config):
    with pytest.raises(ConfigError, match=r"reward\.pattern: found '\(a'; not a regular expression"):
        build_reward(config)


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


def test_without_a_falloff_a_length_outside_has_no_score():
    reward = build_reward(LengthRewardConfig(min_length=0, max_length=0, falloff=0))
    assert reward(build_prompt(""), build_response("one token")).reward == 0.0


def test_an_empty_range_of_lengths_is_named():
    with pytest.raises(ConfigError, match=r"reward\.min_length: found 9; it must be at most reward\.max_length \(8\)"):
        build_reward(LengthRewardConfig(min_length=9, max_length=8))


@pytest.mark.parametrize(
    "override",
    ["numeric reward.tolerance=-1", "length reward.falloff=-1", "code reward.memory_gb=0",
     "format reward.num_workers=0",
     "http reward.url=http://h reward.max_concurrency=0"],
)  # fmt: skip
def test_numbers_out_of_range_are_named(override):
    kind, *others = override.split()
    with pytest.raises(ConfigError, match=rf"^{others[-1].split('=')[0]}: found".replace(".", r"\.")):
        load_config([f"reward={kind}", *others])
