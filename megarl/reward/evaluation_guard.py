"""Keeps scorers of other packages from evaluating what a model wrote as Python.

sympy turns text into Python source and evaluates it, and some of reasoning-gym's scorers call eval(). Both
are narrowed here to what mathematics and lists need; changed only in the scoring process.
"""

import ast
from types import ModuleType
from typing import Any

SCORERS_WITH_EVAL = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""reasoning-gym modules (last part of the name) that call eval() on an answer, to read a list."""
TEXT_TAKERS = frozenset({"Float", "Function", "Integer", "Rational", "Symbol"})
"""The only calls that may hold a string: sympy's own way of writing a name or a number."""
FUNCTIONS = TEXT_TAKERS.union(
    *(["Abs", "Add", "Mul", "Pow", "Max", "Min"], ["Eq", "Ne", "Lt", "Le", "Gt", "Ge", "Not", "And", "Or"]),
    *(["sin", "cos", "tan", "cot", "sec", "csc"], ["sinh", "cosh", "tanh", "coth"]),
    *(["asin", "acos", "atan", "acot", "atan2"], ["asinh", "acosh", "atanh"]),
    *(["exp", "ln", "log", "sqrt", "cbrt", "root"], ["factorial", "binomial", "gamma", "erf"]),
    *(["ceiling", "floor", "sign"], ["re", "im", "conjugate"]),
)
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


def guard_module(module: ModuleType) -> None:
    """eval() inside a scorer's module reads literals only, where the scorer calls it on an answer."""
    if module.__name__.rsplit(".", 1)[-1] in SCORERS_WITH_EVAL:
        module.eval = ast.literal_eval  # type: ignore[attr-defined]


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
