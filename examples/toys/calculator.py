"""The tool `calculator`: arithmetic over the syntax tree of an expression, of which nothing is ever run."""

import ast
import math
import operator
from collections.abc import Callable, Mapping

MAX_CHARACTERS = 500
MAX_BITS = 4096
"""Of a whole number, results in between included"""

Number = int | float


def calculator(expression: str) -> str:
    """Calculate the value of an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % **, parentheses, pi, e, and the functions sqrt, abs, round, floor, ceil, min,
            max, gcd, factorial, exp, log, log2, log10, sin, cos, tan. For example "(12.5 + 3) * 4 / sqrt(2)".
    """
    return format_number(evaluate(expression))


def evaluate(expression: str) -> Number:
    """The value of an expression. ^ is a power, and × ÷ − are read as * / -.

    Raises ValueError saying what cannot be calculated, ArithmeticError for a division by zero or an overflow.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters; {MAX_CHARACTERS} at most")
    for written, meant in (("^", "**"), ("×", "*"), ("÷", "/"), ("−", "-")):
        expression = expression.replace(written, meant)
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression.strip()!r} is not an arithmetic expression") from error
    try:
        return _evaluate(tree.body)
    except RecursionError as error:
        raise ValueError("the expression is nested too deeply") from error


def format_number(value: Number) -> str:
    """A whole number without a point, others with up to 15 digits."""
    if isinstance(value, float):
        return f"{value:.15g}" if abs(value) < 1e15 or not value.is_integer() else f"{value:g}"
    return str(value)


def _evaluate(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _check(value)
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
            value = _evaluate(operand)
            return -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in OPERATIONS:
            return _check(OPERATIONS[type(operation)](_evaluate(left), _evaluate(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            values = [_evaluate(argument) for argument in arguments]
            try:
                return _check(FUNCTIONS[name](*values))
            except TypeError as error:
                raise ValueError(f"{ast.unparse(node)}: {error}") from error
        case ast.Tuple():
            raise ValueError(f"{ast.unparse(node)!r} is no number; write numbers without commas")
    raise ValueError(f"{ast.unparse(node)!r} cannot be calculated")


def _check(value: object) -> Number:
    if isinstance(value, int) and value.bit_length() <= MAX_BITS:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, int | float):
        raise OverflowError("a number is too large")
    raise ValueError(f"the result is a {type(value).__name__}, not a number")  # (-8) ** 0.5 is complex


def _power(base: Number, exponent: Number) -> object:
    """Raises OverflowError before a whole number would get too large to be computed quickly."""
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > 2 * MAX_BITS:
        raise OverflowError("a number is too large")
    return base**exponent


def _factorial(number: Number) -> int:
    if not isinstance(number, int) or not 0 <= number <= 500:
        raise ValueError(f"factorial({number}): the number must be whole, from 0 to 500")
    return math.factorial(number)


def _round(number: Number, digits: Number = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > 300:
        raise ValueError(f"round(..., {digits}): the number of digits must be whole, 300 at most")
    return round(number, digits) if digits else round(number)


OPERATIONS: Mapping[type[ast.operator], Callable[[Number, Number], object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
FUNCTIONS: Mapping[str, Callable[..., object]] = {
    "abs": abs,
    "round": _round,
    "floor": math.floor,
    "ceil": math.ceil,
    "min": min,
    "max": max,
    "gcd": math.gcd,
    "factorial": _factorial,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
}
CONSTANTS: Mapping[str, Number] = {"pi": math.pi, "e": math.e}
