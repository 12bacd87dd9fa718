"""One verdict from a response and the expected answer: equal in value, of the same kind and as evaluated as it."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import sympy

from megarl.task.math_reading import (
    Answer,
    Equation,
    Expression,
    Items,
    Number,
    Region,
    convert,
    make_exact,
    read_answer,
    to_region,
)
from megarl.task.math_text import MAX_CHARACTERS, clean, extract_statements, find_last_value, remove_thinking

_FREE = frozenset(
    re.findall(
        r"\\[a-zA-Z]+",
        r"\frac \sqrt \cdot \times \pi \infty \begin \end \alpha \beta \gamma \theta \phi \lambda \mu \omega \mathbb"
        r" \cup \cap \emptyset \varnothing \setminus \circ \le \ge \ne \in \overline \imath \hline",
    )
)
"""Commands that stand for no operation left to be done; others may stand in an answer where they stand in the gold."""
_ENDLESS = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative)
_DIGITS = 50
_POINTS = 3


def is_equal(gold: Answer, answer: Answer) -> bool:
    """Whether the answer equals the gold and is as evaluated; what cannot be compared is not equal."""
    try:
        return _is_equal(gold, answer)
    except MemoryError:
        raise
    except Exception:  # sympy has many kinds of errors for what it cannot evaluate or compare.
        return False


def _is_equal(gold: Answer, answer: Answer) -> bool:
    solutions = _read_solutions(gold)
    if solutions is not None:
        return _equals_named(solutions, gold, answer)
    if isinstance(answer, Equation):
        return _equals_equation(gold, answer)
    if isinstance(gold, Equation):
        return _is_name(gold.sides[0], operators=False) and is_equal(gold.value, answer)
    if isinstance(gold, Number):
        return _equals_number(gold, answer)
    if isinstance(gold, Items) and isinstance(answer, Items):
        return _equals_items(gold, answer)
    gold_region, region = to_region(gold), to_region(answer)
    if gold_region and region:
        if gold_region.name and region.name and gold_region.name != region.name:
            return False
        return gold_region.set == region.set or bool(gold_region.set.symmetric_difference(region.set).is_empty)
    if isinstance(answer, Number):
        answer = _to_product(answer) or Expression(_to_tree(answer), "", answer.unit)
    return isinstance(gold, Expression) and isinstance(answer, Expression) and _equals_expression(gold, answer)


def write_answer(answer: Answer) -> str | None:
    """One text for equal answers, as far as evaluating them makes their texts equal; None for one too long."""
    try:
        match answer:
            case Number():
                base = f"_{answer.base}" if answer.base else ""
                return str(answer.value) + base + ("%" if answer.is_percent else "")
            case Expression():
                # 52 + 70 is no vote for 122, and sums may be endless.
                is_open = count_open_operations(answer.tree) or _find_operations(answer.latex)
                is_open = is_open and (not answer.tree.free_symbols or answer.tree.has(*_ENDLESS))
                return answer.latex if is_open else str(make_exact(answer.tree))
            case Region():
                return str(answer.set)
            case Equation():
                return write_answer(answer.value)
            case Items():
                texts = [write_answer(item) or "" for item in answer.items]
                texts = list(set(texts)) if answer.brackets == "{}" else texts
                ordered = texts if answer.brackets not in ("", "{}") else sorted(texts)
                brackets = answer.brackets or "{}"
                return brackets[0] + ", ".join(ordered) + brackets[1]
    except MemoryError:
        raise
    except Exception:  # Numbers of thousands of digits cannot be written, and sympy cannot evaluate everything.
        return None


def _equals_number(gold: Number, answer: Answer) -> bool:
    """Whether the answer is this number, the product that 5 m may also be, or the set of that one number, {5, 5}."""
    if isinstance(answer, Items):
        return answer.brackets == "{}" and all(is_equal(gold, item) for item in answer.items)
    if not isinstance(answer, Number):
        product = _to_product(gold)
        return product is not None and isinstance(answer, Expression) and _equals_expression(product, answer)
    is_same_share = gold.is_percent != answer.is_percent and gold.share == answer.share
    if gold.form == "integer" and answer.form in ("fraction", "mixed") and not (gold.is_percent and is_same_share):
        return False
    factor = convert(answer.unit, gold.unit)
    if factor is None or answer.base != gold.base:
        return False
    if answer.share * factor == gold.share and not (answer.is_percent and gold.form == "integer"):
        return True
    # One of them may lack the sign, as 50 for 50%; but a share is no percentage: 0.5% is not 0.5, nor 1.5% 3/2.
    has_digits = gold.value == 0 or (abs(gold.value) >= 1 and (gold.is_percent or gold.form != "fraction"))
    return has_digits and answer.value * factor == gold.value


def _equals_equation(gold: Answer, answer: Equation) -> bool:
    """The last side is the value; sides that are numbers must equal it, and the first may name it."""
    if isinstance(gold, Equation):
        first, expected = (re.sub(r"\s|\\text|[{}]", "", sides[0]) for sides in (answer.sides, gold.sides))
        if first == expected and is_equal(gold.value, answer.value):
            return True
        return _equals_function(gold, answer) or _equals_curve(gold, answer)
    if not is_equal(gold, answer.value):
        return False
    value = answer.value
    return _is_name(answer.sides[0]) or all(
        _is_zero(_to_tree(read_answer(side)) - _to_tree(value)) for side in answer.sides
    )


def _is_name(side: str, *, operators: bool = True) -> bool:
    """Whether the side names a quantity (x, f(2), m + n, P(A)) rather than being a sum to solve such as 2x + 3.
    operators: whether m + n is a name; on the left of an expected equation it is the left of a curve."""
    if re.fullmatch(r"\(\s*[A-Za-z]\w*(?:\s*,\s*[A-Za-z]\w*)+\s*\)", side):
        return True
    side = re.sub(r"_\{[^{}]*\}|_\w|\([^()]*\)", "", side)
    if not operators and re.search(r"[-+*^]", side):
        return False
    side = re.sub(r"\\text\{[^{}]*\}|\^\{[^{}]*\}|\^\w", "", side)
    return bool(re.search(r"[A-Za-z]", side)) and not re.search(r"\d", side)


def _equals_function(gold: Equation, answer: Equation) -> bool:
    """Whether they are one function of one variable that has another letter in each: f(x) = 2x, f(y) = 2y."""
    heads: Any = [re.fullmatch(r"(\w+)\s*\(\s*([a-zA-Z])\s*\)", side.sides[0]) for side in (gold, answer)]
    if not all(heads) or heads[0][1] != heads[1][1] or heads[0][2] == heads[1][2]:
        return False
    if not isinstance(gold.value, Expression) or not isinstance(answer.value, Expression):
        return False
    letters = {
        symbol: sympy.Symbol(heads[0][2], real=symbol.is_real)
        for symbol in answer.value.tree.free_symbols
        if symbol.name == heads[1][2]
    }
    return _equals_expression(gold.value, replace(answer.value, tree=answer.value.tree.xreplace(letters)))


def _read_solutions(answer: Any) -> list[dict[str, Answer]] | None:
    """The values by name: one dict for x = 1, y = 2 and for (x, y) = (1, 2), two for p=5, q=2; p=7, q=2. None for what
    has no two names; empty where not every name has equally many values."""
    names: list[str] = []
    values: Any = ()
    if isinstance(answer, Equation) and isinstance(answer.value, Items) and answer.value.brackets == "()":
        found = re.fullmatch(r"\(([^()]*)\)", answer.sides[0])
        names, values = re.split(r"\s*,\s*", found[1].strip()) if found else [], answer.value.items
    elif isinstance(answer, Items) and all(isinstance(item, Equation) for item in answer.items):
        names = [re.sub(r"\s|\\text|[{}]", "", item.sides[0]) for item in answer.items]  # type: ignore[union-attr]
        values = [item.value for item in answer.items]  # type: ignore[union-attr]
    size = len(set(names))
    if size < 2 or len(names) != len(values) or not all(_is_name(name, operators=False) for name in names):
        return None
    blocks = [dict(zip(names[i : i + size], values[i : i + size], strict=True)) for i in range(0, len(names), size)]
    return blocks if all(len(block) == size for block in blocks) else []


def _equals_named(solutions: list[dict[str, Answer]], gold: Any, answer: Any) -> bool:
    """Values with names: with the same names in any order, without names in the order of the gold."""
    answers = _read_solutions(answer)
    if answers is None:
        brackets, items = (answer.brackets, answer.items) if isinstance(answer, Items) else (None, ())
        if len(solutions) > 1 and brackets in ("", "{}"):
            rows = [each.items if isinstance(each, Items) and each.brackets == "()" else () for each in items]
        elif len(solutions) == 1 and brackets in ("()", getattr(gold, "brackets", "()")):
            rows = [() if any(isinstance(each, Equation) for each in items) else items]
        else:
            return False
        answers = [dict(zip(solutions[0], row, strict=True)) for row in rows]
    elif not solutions or not answers:
        return isinstance(gold, Items) and isinstance(answer, Items) and _equals_items(gold, answer)
    return _match(
        solutions,
        answers,
        lambda one, other: one.keys() == other.keys() and all(is_equal(one[name], other[name]) for name in one),
    )


def _match(golds: Any, answers: Any, equals: Callable[[Any, Any], bool]) -> bool:
    """Whether each has an equal one of its own, in any order."""
    rest = list(answers)
    for gold in golds:
        position = next((i for i, answer in enumerate(rest) if equals(gold, answer)), None)
        if position is None:
            return False
        del rest[position]
    return not rest


def _equals_curve(gold: Equation, answer: Equation) -> bool:
    """Whether two equations in the same variables are multiples of one another; a solved x = 5 asks for x = 5."""
    lefts = [read_answer(gold.sides[0]), read_answer(answer.sides[0])]
    rights = [gold.value, answer.value]
    trees = [_to_tree(left) - _to_tree(right) for left, right in zip(lefts, rights, strict=True)]
    if len(trees[0].free_symbols) < 2 or trees[0].free_symbols != trees[1].free_symbols:
        return False
    ratio = sympy.simplify(trees[0] / trees[1])
    return bool(ratio.is_number and ratio.is_finite and not ratio.is_zero)


def _to_tree(answer: Any) -> Any:
    if isinstance(answer, Number):
        return sympy.Rational(answer.share)
    return make_exact(answer.tree)


def _to_product(number: Number) -> Expression | None:
    """A number with a unit of one letter as the product that it may also be: 5 m for 5m; None for other numbers."""
    found = re.fullmatch(r"([A-Za-z])(?:\^\{?([23])\}?)?", " ".join(number.unit.words))
    if found is None:
        return None
    factor = sympy.Symbol(found[1].lower(), real=True) ** int(found[2] or 1)
    return Expression(_to_tree(number) * factor, number.unit.words[0])


def _equals_items(gold: Items, answer: Items) -> bool:
    """Lists and sets in any order, tuples and intervals in order; a set may be written as a list, and repeat itself."""
    unordered = ("", "{}")
    if gold.brackets != answer.brackets and not (gold.brackets in unordered and answer.brackets in unordered):
        return False
    if gold.brackets == answer.brackets == "{}":
        return all(any(is_equal(item, other) for other in answer.items) for item in gold.items) and all(
            any(is_equal(item, other) for item in gold.items) for other in answer.items
        )
    if len(gold.items) != len(answer.items):
        return False
    if gold.brackets not in unordered:
        return all(map(is_equal, gold.items, answer.items))
    return _match(gold.items, answer.items, is_equal)


def _equals_expression(gold: Expression, answer: Expression) -> bool:
    commands, allowed = _find_operations(answer.latex), _find_operations(gold.latex)
    if not commands <= allowed or convert(answer.unit, gold.unit) != 1:
        return False
    if count_open_operations(answer.tree) > count_open_operations(gold.tree):
        return False
    left, right = make_exact(gold.tree), make_exact(answer.tree)
    if left == right:
        return not left.has(sympy.zoo, sympy.nan)
    if isinstance(gold.tree, sympy.Symbol) or not all(isinstance(tree, sympy.Expr) for tree in (left, right)):
        return False
    return _is_zero(left - right)


def _find_operations(latex: str) -> set[str]:
    found = set(re.findall(r"\\[a-zA-Z]+", latex)) - _FREE
    return found | {sign for sign in "!|" if sign in latex} | set(re.findall(r"\{d\}\{d|\bd[xyzt]$", latex))


def count_open_operations(tree: Any) -> int:
    """How many sums, products and powers of the tree are left to be done: 52 + 70, 2x + 3x, 2^10, sqrt(144)."""
    if not isinstance(tree, sympy.Expr):
        return sum(count_open_operations(part) for part in getattr(tree, "args", ()))
    count = sum(count_open_operations(part) for part in tree.args)
    if isinstance(tree, sympy.Add):
        terms = [term.doit() for term in _flatten(tree, sympy.Add)]
        count += len(sympy.Add.make_args(sympy.Add(*terms))) < len(terms)
    elif isinstance(tree, sympy.Mul):
        count += _has_open_product(_flatten(tree, sympy.Mul))
    return int(count)


def _flatten(tree: Any, kind: Any) -> list[Any]:
    return [part for arg in tree.args for part in (_flatten(arg, kind) if isinstance(arg, kind) else [arg])]


def _has_open_product(factors: list[Any]) -> bool:
    """More than one number above or below the bar, or twice the same symbol or root."""
    above = [factor for factor in factors if factor.is_Float or (factor.is_Rational and abs(factor) != 1)]
    below = [factor for factor in factors if factor.is_Pow and factor.exp == -1 and factor.base.is_Rational]
    bases = [factor.as_base_exp()[0] for factor in factors if not factor.is_Rational and factor not in below]
    simple = [base for base in bases if base.is_Atom]
    return len(above) > 1 or len(below) > 1 or len(set(simple)) < len(simple)


def _is_zero(difference: Any) -> bool:
    """Whether the expression is zero for all values of its symbols: at random points, to 50 digits. Schwartz-Zippel: an
    expression that is not zero everywhere is zero at a random point with probability about 0."""
    symbols = sorted(difference.free_symbols, key=str)
    chance = random.Random(0)
    for _ in range(_POINTS if symbols else 1):
        point = {symbol: sympy.Rational(chance.randint(-(10**6), 10**6), 10**5 + 3) for symbol in symbols}
        value = difference.subs(point).evalf(_DIGITS, maxn=4 * _DIGITS)
        if not value.is_number or not value.is_finite or abs(value) > sympy.Float(10) ** (10 - _DIGITS):
            return False
    return True


_DENIAL = re.compile(r"(?:not|unknown|undetermined|unclear|undefined|none|impossible|cannot|can ?not|can't)\b", re.I)
_CHOICE = re.compile(
    r"(?:option |choice |answer )?(?:\(([A-J])\)|([A-J])(?=[).:]|$))(?!.*(?:\([A-J]\)|\bor\b))(.*)", re.I
)
_PROSE = re.compile(r"(?<![\\\w{])(?!sqrt|sin|cos|tan|log|ln|pi)[A-Za-z]{2,} ")
"""A word in a response that is not marked as an answer; letters would be factors."""
_WORDS = re.compile(r"[A-Za-z][A-Za-z '.-]*[A-Za-z.]")
_TIME = re.compile(r"[012]?\d:[0-5]\d(?!\d)")
_SYMBOLS = frozenset("abcmnpqrtuvwxyz")
MAX_STATEMENTS = 20
"""A response with more different statements states no one answer."""


@dataclass(frozen=True)
class Verdict:
    is_right: bool
    is_read: bool
    """Whether the response states one answer that can be read."""
    answer: str | None
    """The answer in one way of writing, for majority votes."""


def grade(gold_text: str, text: str, mode: str, *, thinking: bool = False) -> Verdict:
    """Whether the response states the expected answer, once or several times, and no other one. mode: reward.answer.
    thinking: the prompt ends with an open thinking tag."""
    visible = remove_thinking(text, thinking=thinking)
    extracted = extract_statements(visible, mode)
    statements = list(dict.fromkeys(extracted or []))
    if extracted is None or len(statements) > MAX_STATEMENTS:
        return Verdict(False, False, None)
    whole = visible.strip()
    if not statements and mode != "boxed" and 0 < len(whole) <= MAX_CHARACTERS:
        statements = [whole]
    choice = re.fullmatch(r"\(?([A-J])\)?\.?", strip_text(gold_text))
    if choice:
        chosen = [_CHOICE.match(strip_text(each)) for each in statements]
        return _grade_texts(choice.group(1), [(found[1] or found[2]).upper() if found else "" for found in chosen])
    gold = None if _is_words(strip_text(gold_text)) else read_answer(gold_text)
    if gold is None:
        return _grade_texts(_fold(gold_text), [_fold(each) for each in statements])
    readings = [read_answer(each) for each in statements]
    if statements == [whole] and isinstance(readings[0], Expression) and _PROSE.search(whole):
        readings = [None]
    answers = [reading for reading in readings if reading is not None]
    if not answers and mode == "any" and statements in ([], [whole]):
        last = find_last_value(whole[-MAX_CHARACTERS:])
        answers = [found for found in [read_answer(last) if last else None] if found]
    denied = any(
        reading is None and _DENIAL.match(strip_text(each)) for reading, each in zip(readings, statements, strict=True)
    )
    return _grade_answers(gold, answers) if answers and not denied else Verdict(False, False, None)


def _grade_answers(gold: Answer, answers: list[Answer]) -> Verdict:
    written = [write_answer(answer) for answer in answers]
    if len(set(written)) > 1 and _is_list(gold) and not any(map(_is_list, answers)):
        answers = [Items("", tuple(dict(zip(written, answers, strict=True)).values()))]
        written = [write_answer(answers[0])]
    if all(is_equal(gold, answer) for answer in answers):
        return Verdict(True, True, written[-1])
    is_one = len(set(written)) == 1
    return Verdict(False, is_one, written[0] if is_one else None)


def _is_list(answer: Answer) -> bool:
    return isinstance(answer, Items) and answer.brackets in ("", "{}")


def _grade_texts(gold: str, texts: list[str]) -> Verdict:
    found = {text for text in texts if text}
    answer = found.pop() if len(found) == 1 else None
    return Verdict(answer is not None and answer == gold, answer is not None, answer)


def strip_text(text: str) -> str:
    """Plain words of LaTeX text: without \\text{}, $ and bold."""
    return re.sub(r"\\text\{([^{}]*)\}", r" \1 ", clean(text)).strip()


def _is_words(text: str) -> bool:
    """Whether a gold is words or a time of day, and no product of symbols or ratio."""
    if _TIME.match(text):
        return True
    if not _WORDS.fullmatch(text) or text in ("pi", "infinity"):
        return False
    return " " in text or len(text) > 3 or not set(text.lower()) <= _SYMBOLS


def _fold(text: str) -> str:
    """Words without case, spaces, quotes and a full stop at the end."""
    return re.sub(r"\s+|[\"'`]|\\[,; ]|[{}$]", "", strip_text(text)).casefold().rstrip(".!")
