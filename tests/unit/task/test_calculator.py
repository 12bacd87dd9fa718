"""The calculator's arithmetic, and what it refuses."""

import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.examples.toys.calculator import calculator, evaluate

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
