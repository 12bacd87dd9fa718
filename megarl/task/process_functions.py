"""What processes of their own run of megarl's: scorers of other packages, regular expressions, tools.

sympy turns text into Python source and evaluates it, and some of reasoning-gym's scorers call eval(). Both are narrowed
here to what mathematics and lists need; changed only in the scoring process. torch is not imported here, which takes
seconds.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from megarl.task.process import call, load_callable
from megarl.task.sandbox import find_protections, python

TEXT_TAKERS = frozenset({"Float", "Function", "Integer", "Rational", "Symbol"})
"""The only calls that may hold a string: sympy's own way of writing a name or a number."""
FUNCTIONS = TEXT_TAKERS | {
    *("Abs", "Add", "Mul", "Pow", "Max", "Min", "Eq", "Ne", "Lt", "Le", "Gt", "Ge", "Not", "And", "Or", "sin", "cos"),
    *("tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth", "asin", "acos", "atan", "acot", "atan2", "asinh"),
    *("acosh", "atanh", "exp", "ln", "log", "sqrt", "cbrt", "root", "factorial", "binomial", "gamma", "erf"),
    *("ceiling", "floor", "sign", "re", "im", "conjugate"),
}
NODES: tuple[type[ast.AST], ...] = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.operator, ast.unaryop, ast.cmpop),
    *(ast.Constant, ast.Name, ast.Tuple, ast.List, ast.keyword, ast.expr_context),
)
"""What may stand in the source besides calls."""


def guard_sympy() -> None:
    """Make sympy evaluate only arithmetic, names and common functions; other text raises ValueError."""
    from sympy.parsing import sympy_parser

    stringify = sympy_parser.stringify_expr

    def guarded_stringify(*args: Any, **kwargs: Any) -> str:
        source: str = stringify(*args, **kwargs)
        check_source(source)
        return source

    sympy_parser.stringify_expr = guarded_stringify


def check_source(source: str) -> None:
    """Raises ValueError unless the source is nothing but operators, numbers, names and calls of FUNCTIONS."""
    try:
        tree = ast.parse(source.strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"not an expression: {error}") from error
    texts: set[int] = set()
    for node in ast.walk(tree):  # Parents come before their children.
        if isinstance(node, ast.Call):
            if not _is_allowed(node.func):
                raise ValueError(f"{ast.unparse(node.func)} is not a function that an answer may use")
            if isinstance(node.func, ast.Name) and node.func.id in TEXT_TAKERS:
                texts.update(map(id, node.args))
        elif not isinstance(node, NODES):
            raise ValueError(f"{type(node).__name__} is not part of an answer")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in texts:
            raise ValueError("text is not part of an answer")


def _is_allowed(function: ast.expr) -> bool:
    """Whether f(...) may be called; Function('f')(...) is how sympy writes a function it does not know."""
    if isinstance(function, ast.Call):
        return isinstance(function.func, ast.Name) and function.func.id == "Function"
    return isinstance(function, ast.Name) and function.id in FUNCTIONS


Scorer = Callable[..., dict[str, Any]]


def build_math_scorer() -> Scorer:
    """(gold, text, mode, thinking) -> {"correct", "read", "answer"}; see megarl.task.math_grading."""
    from megarl.task.math_grading import grade

    guard_sympy()

    def score(gold: str, text: str, mode: str, thinking: bool) -> dict[str, Any]:
        verdict = grade(gold, text, mode, thinking=thinking)
        return {"correct": verdict.is_right, "read": verdict.is_read, "answer": verdict.answer}

    return score


def build_pattern_matcher(pattern: str) -> Callable[..., bool]:
    """(text) -> whether the text but for white space at its ends matches the pattern."""
    compiled = re.compile(pattern, re.DOTALL)
    return lambda text: compiled.fullmatch(text.strip()) is not None


def load_tools(paths: Mapping[str, str], result_length: int) -> Callable[..., str]:
    """The function (name, arguments) -> result as text, of the tools at `paths`, package.module:function by name.

    A result that is no text is given as JSON; results are cut to `result_length` characters. Raises ValueError for a
    path that names no function.
    """
    functions = {name: load_callable(path) for name, path in paths.items()}
    if functions.get("python") is python:
        find_protections()  # Tries what the machine has, which takes a second: no call's time.

    def run(name: str, arguments: dict[str, Any]) -> str:
        result = call(functions[name], **arguments)
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        more = len(text) - result_length
        return text if more <= 0 else f"{text[:result_length]}\n... ({more} more characters)"

    return run
