"""The verifier of the tiny task."""

import math
from collections.abc import Sequence

import pytest
from data_cases import load_toy
from reward_cases import build_prompt, build_response, build_reward

from megarl.config.errors import ConfigError
from megarl.config.schema.reward import LetterCountRewardConfig
from megarl.task.problems import Problem
from megarl.task.rule_rewards import compute_length_score
from megarl.task.sources import FunctionSource
from megarl.types import FinishReason

LETTERS = "abcdef"
NUMBERS = range(4, 65)
REWARD = build_reward(LetterCountRewardConfig())


def best_blind_score(requests: Sequence[tuple[str, int]], tolerance: float, falloff: float) -> float:
    """The highest mean reward over (letter, number) pairs of any distribution over answers that ignores the prompt.

    An answer of length l with shares s_c of each letter earns on average the sum over c of s_c * G_c(l), where
    G_c(l) is the sum of g(l / n) over the pairs (c, n), divided by the number of pairs. The shares add up to 1 at
    most, so one letter alone is best. Past the largest number times tolerance and falloff g is 0, so the lengths to
    try are finite.
    """
    longest = math.ceil(max(number for _, number in requests) * tolerance * falloff)
    return max(
        sum(compute_length_score(length / n, tolerance, falloff) for c, n in requests if c == letter) / len(requests)
        for length in range(longest + 1)
        for letter in {c for c, _ in requests}
    )


def score(answer: str, text: str, finish_reason: FinishReason = FinishReason.stop):
    return REWARD(build_prompt(answer), build_response(text, finish_reason))


def parse_answers(problems: Sequence[Problem]) -> list[tuple[str, int]]:
    return [(problem.answer[0], int(problem.answer[1:])) for problem in problems]


@pytest.mark.parametrize("seed", range(20))
def test_the_best_answer_that_ignores_the_prompt_scores_at_most_a_fifth_on_both_splits(seed):
    config = LetterCountRewardConfig()
    splits = FunctionSource(load_toy("letter_count")).load(seed)
    assert best_blind_score(parse_answers(splits.heldout), config.tolerance, config.falloff) <= 0.2
    assert best_blind_score(parse_answers(splits.train), config.tolerance, config.falloff) <= 0.2


def test_the_blind_bound_is_reached_by_the_verifier_itself():
    config = LetterCountRewardConfig()
    requests = [(letter, number) for letter in LETTERS for number in NUMBERS if letter != "f" or number > 20]
    prompts = [f"{letter}{number}" for letter, number in requests]
    answers = ["a" * length for length in range(1, 200, 3)] + [LETTERS * count for count in range(1, 20)]
    best = max(sum(score(p, text).reward for p in prompts) / len(prompts) for text in answers)
    bound = best_blind_score(requests, config.tolerance, config.falloff)
    assert bound - 0.01 < best <= bound + 1e-9


def test_the_right_letter_at_the_right_length_is_correct():
    result = score("b37", "b" * 37)
    assert result.reward == 1.0
    assert result.correct
    assert result.details == {"letters": 1.0, "length": 1.0}


@pytest.mark.parametrize("length", [30, 46])
def test_lengths_within_the_tolerance_count_fully(length):
    assert score("b37", "b" * length).reward == 1.0


@pytest.mark.parametrize(("length", "expected"), [(10, 1.0), (16, 0.66096), (25, 0.33904), (40, 0.0), (50, 0.0)])
def test_the_length_score_falls_linearly_in_the_logarithm(length, expected):
    """By hand at number 8, tolerance 1.25, falloff 4: 16 is off by 2, log(2/1.25)/log 4 = 0.33904."""
    assert score("b8", "b" * length).details["length"] == pytest.approx(expected, abs=1e-5)


def test_too_short_and_too_long_by_one_factor_score_alike():
    assert score("c40", "c" * 20).reward == pytest.approx(score("c10", "c" * 20).reward)


def test_letters_are_counted_as_a_share():
    result = score("b4", "bbxb")
    assert result.details == {"letters": 0.75, "length": 1.0}
    assert result.reward == 0.75
    assert not result.correct


def test_an_empty_response_scores_nothing_with_the_same_details():
    result = score("b4", "")
    assert (result.reward, result.correct) == (0.0, False)
    assert result.details == {"letters": 0.0, "length": 0.0}


def test_a_response_cut_at_the_limit_counts_with_the_length_it_has():
    assert score("b37", "b" * 37, FinishReason.length) == score("b37", "b" * 37)


@pytest.mark.parametrize("answer", ["37", "b", "b0", "bb3", ""])
def test_an_answer_of_another_task_is_an_error_that_names_the_prompt(answer):
    with pytest.raises(ValueError, match=r"prompt 'p1'.*data=letter_count"):
        score(answer, "b")


def test_bad_tolerance_and_falloff_are_both_named():
    with pytest.raises(ConfigError) as caught:
        build_reward(LetterCountRewardConfig(tolerance=0.5, falloff=1.0))
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "reward.tolerance",
        "reward.falloff",
    ]
