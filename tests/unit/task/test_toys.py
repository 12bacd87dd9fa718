"""examples/toys: guesses and the best scores of policies that ignore or read the answers; the calculator."""

import operator
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.environment import Action, EpisodeSetting, Step
from megarl.examples.toys.calculator import calculator, evaluate
from megarl.examples.toys.guess import Guess, compute_best_with_answers, read_guess
from megarl.types import FinishReason, Prompt


def begin(number: int | str, max_turns: int = 3) -> Guess:
    environment = Guess(max_turns, ">", "<")
    environment.reset(EpisodeSetting(Prompt("p", "1-7", (1,), str(number)), seed=1))
    return environment


def act(environment: Guess, text: str, turn: int, finish_reason: FinishReason = FinishReason.stop) -> Step:
    return environment.step(Action(text, text, (1,), turn, finish_reason))


def test_each_guess_is_answered_with_higher_or_lower_until_it_is_right():
    environment = begin(5)
    details = {"ruled_out": 0.0, "unreadable": 0.0}
    assert act(environment, "4", 0) == Step(">", details=details)
    assert act(environment, "6", 1) == Step("<", details=details)
    assert act(environment, "5", 2) == Step(reward=1.0, done=True, details=details)


def test_an_action_without_a_number_ends_the_episode():
    assert act(begin(5), "<>", 0) == Step(done=True, details={"ruled_out": 0.0, "unreadable": 1.0})


@pytest.mark.parametrize(("guesses", "ruled_out"), [("46", 0), ("43", 1), ("44", 1), ("17", 0), ("11", 1)])
def test_a_guess_that_an_earlier_answer_ruled_out_is_counted(guesses, ruled_out):
    environment = begin(5)
    found = [act(environment, text, turn).details["ruled_out"] for turn, text in enumerate(guesses)]
    assert found == [0, ruled_out]


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ("4", 4),
        ("1 to 7? I guess 4.", 4),
        ("47", 47),
        ("004", 4),
        ("0", 0),
        ("", None),
        ("four", None),
        ("٤", None),
        ("9" * 100_000, 10**18 - 1),
    ],
)
def test_the_guess_is_the_last_whole_number(text, guess):
    assert read_guess(text) == guess


@pytest.mark.parametrize("answer", ["b12", "", "-1", "3.5", "1" * 19])
def test_data_without_numbers_are_refused_naming_the_prompt(answer):
    with pytest.raises(ValueError, match=r"prompt 'p': answer .* needs a whole number"):
        begin(answer)


@cache
def search(size: int, turns: int) -> int:
    """The most of `size` numbers in a row that `turns` guesses find."""
    if not size or not turns:
        return 0
    return 1 + max(search(left, turns - 1) + search(size - 1 - left, turns - 1) for left in range(size))


@pytest.mark.parametrize("max_turns", [1, 2, 3, 4])
def test_the_best_score_with_answers_is_that_of_a_search_over_all_first_guesses(max_turns):
    for max_number in range(1, 20):
        assert compute_best_with_answers(max_number, max_turns) == search(max_number, max_turns) / max_number


OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("347 * 892", "309524"),
        (" (12 + 3) * -4 ", "-60"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("7 // 2 + 7 % 4", "6"),
        ("2 ** 10", "1024"),
        ("2 ^ 10 + 1", "1025"),
        ("6 × 7 ÷ 2 − 1", "20"),
        ("0.1 + 0.2", "0.3"),
        ("sqrt(16) + max(1, 2, 3)", "7"),
        ("round(2.567, 2)", "2.57"),
        ("cos(pi)", "-1"),
        ("factorial(5)", "120"),
        ("1e20 * 1.0", "1e+20"),
        ("2 ** 200", str(2**200)),
    ],
)
def test_the_calculator_calculates(expression: str, expected: str) -> None:
    assert calculator(expression) == expected


@given(
    st.integers(-999, 999),
    st.lists(st.tuples(st.sampled_from(sorted(OPERATORS)), st.integers(0, 999)), min_size=1, max_size=4),
)
def test_parenthesized_chains_agree_with_pythons_integers(first: int, steps: list[tuple[str, int]]) -> None:
    expression, value = str(first), first
    for sign, number in steps:
        expression, value = f"({expression}) {sign} {number}", OPERATORS[sign](value, number)
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "not an arithmetic expression"),
        ("12 *", "not an arithmetic expression"),
        ("1,234 * 2", "without commas"),
        ("__import__('os').system('true')", "cannot be calculated"),
        ("().__class__", "cannot be calculated"),
        ("'a' * 3", "cannot be calculated"),
        ("[1][0]", "cannot be calculated"),
        ("lambda: 1", "cannot be calculated"),
        ("x + 1", "'x' cannot be calculated"),
        ("True + 1", "cannot be calculated"),
        ("1 if 2 else 3", "cannot be calculated"),
        ("max(*[1, 2])", "cannot be calculated"),
        ("round(2.5, ndigits=1)", "cannot be calculated"),
        ("sqrt(1, 2)", "sqrt"),
        ("(-8) ** 0.5", "complex"),
        ("sqrt(-1)", "math domain error"),
        ("1 + " * 200 + "1", "500 at most"),
        ("(" * 300 + "1" + ")" * 190, "not an arithmetic"),
        ("factorial(10**6)", "from 0 to 500"),
    ],
)
def test_what_is_no_arithmetic_is_refused(expression: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(expression)


@pytest.mark.parametrize(
    "expression", ["9 ** 9 ** 9", "2 ** 5000", "factorial(500) ** 2", "1e308 * 10", "10.0 ** 400", "1 / 0", "5 % 0"]
)
def test_numbers_that_are_too_large_end_at_once(expression: str) -> None:
    with pytest.raises(ArithmeticError):
        evaluate(expression)
