"""examples/toys: guesses and the best scores of policies that ignore or read the answers; the calculator."""

import itertools
import operator
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.environment import Action, EpisodeSetting, Step
from megarl.examples.toys.calculator import calculator, evaluate
from megarl.examples.toys.guess import Guess, compute_best_with_answers
from megarl.types import FinishReason, Prompt


def begin(number: int | str, max_turns: int = 3) -> Guess:
    environment = Guess(max_turns, ">", "<")
    environment.reset(EpisodeSetting(Prompt("p", "1-7", (1,), str(number)), seed=1))
    return environment


@pytest.mark.parametrize(
    ("guesses", "steps"),
    [
        # Answered with higher or lower until it is right,
        (("4", "6", "1 to 7? I guess 005."), [(">", 0, 0), ("<", 0, 0), (None, 0, 0)]),
        # ended by an action without a number; a guess that an earlier answer ruled out is counted.
        *[((text,), [(None, 0, 1)]) for text in ("<>", "", "four", "٥")],
        *[(("4", text), [(">", 0, 0), (">", 1, 0)]) for text in ("3", "4", "0")],
        (("1", "47"), [(">", 0, 0), ("<", 0, 0)]),
        (("1", "9" * 100_000), [(">", 0, 0), ("<", 0, 0)]),
    ],
)
def test_a_guess_is_answered(guesses, steps):
    environment = begin(5)
    for turn, (text, (observation, ruled_out, unreadable)) in enumerate(zip(guesses, steps, strict=True)):
        details = {"ruled_out": ruled_out, "unreadable": unreadable}
        step = environment.step(Action(text, text, (1,), turn, FinishReason.stop))
        end = Step(reward=float("005" in text), done=True, details=details)
        assert step == (end if observation is None else Step(observation, details=details))
    for answer in ("b12", "", "-1", "3.5", "1" * 19):
        with pytest.raises(ValueError, match=r"prompt 'p': answer .* needs a whole number"):
            begin(answer)


@cache
def search(size: int, turns: int) -> int:
    """The most of `size` numbers in a row that `turns` guesses find."""
    if not size or not turns:
        return 0
    return 1 + max(search(left, turns - 1) + search(size - 1 - left, turns - 1) for left in range(size))


def test_the_best_score_with_answers_is_that_of_a_search_over_all_first_guesses():
    for max_number, max_turns in itertools.product(range(1, 20), range(1, 5)):
        assert compute_best_with_answers(max_number, max_turns) == search(max_number, max_turns) / max_number


OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("347 * 892", "309524"), (" (12 + 3) * -4 ", "-60"), ("7 / 2", "3.5"), ("6 / 2", "3"), ("7 // 2 + 7 % 4", "6"),
        ("2 ** 10", "1024"), ("2 ^ 10 + 1", "1025"), ("6 × 7 ÷ 2 − 1", "20"), ("0.1 + 0.2", "0.3"),
        ("sqrt(16) + max(1, 2, 3)", "7"), ("round(2.567, 2)", "2.57"), ("cos(pi)", "-1"), ("factorial(5)", "120"),
        ("1e20 * 1.0", "1e+20"), ("2 ** 200", str(2**200)),
    ],
)  # fmt: skip
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


REFUSED = {
    "not an arithmetic": ["", "12 *", "(" * 300 + "1" + ")" * 190],
    "without commas": ["1,234 * 2"],
    "cannot be calculated": [
        *("__import__('os').system('true')", "().__class__", "'a' * 3", "[1][0]", "lambda: 1", "x + 1", "True + 1"),
        *("1 if 2 else 3", "max(*[1, 2])", "round(2.5, ndigits=1)"),
    ],
    "sqrt": ["sqrt(1, 2)"],
    "complex": ["(-8) ** 0.5"],
    "math domain error": ["sqrt(-1)"],
    "500 at most": ["1 + " * 200 + "1"],
    "from 0 to 500": ["factorial(10**6)"],
    # Numbers that are too large end at once.
    "": ["9 ** 9 ** 9", "2 ** 5000", "factorial(500) ** 2", "1e308 * 10", "10.0 ** 400", "5 % 0"],
}


@pytest.mark.parametrize(("message", "expressions"), REFUSED.items())
def test_what_is_no_arithmetic_is_refused(message: str, expressions: list[str]) -> None:
    for expression in expressions:
        with pytest.raises(ValueError if message else ArithmeticError, match=message or None):
            evaluate(expression)
