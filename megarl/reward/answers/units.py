"""Units behind a number: which are known, which are the same, and how large one is in another."""

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from sympy.physics import units as sympy_units
from sympy.physics.units.quantities import Quantity
from sympy.physics.units.systems.si import SI

SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_MONEY: dict[str, int | Fraction] = {
    "$": 1,
    "dollar": 1,
    "usd": 1,
    "buck": 1,
    "cent": Fraction(1, 100),
    "¢": Fraction(1, 100),
}
_SHORT = {"mins": "minute", "min": "minute", "sec": "second", "hr": "hour", "yr": "year", "deg": "degree"}
_SHORT |= {"°": "degree", "in": "inch", "inche": "inch", "feet": "foot", "lb": "pound", "litre": "liter"}
_SHORT |= {"metre": "meter", "centimetre": "centimeter", "kilometre": "kilometer", "ml": "milliliter"}
_SHORT |= {
    "mph": "mile per hour",
    "kph": "kilometer per hour",
    "kmh": "kilometer per hour",
    "sq": "square",
    "€": "euro",
}
_NOT_IN_UNITS = frozenset(
    re.findall(
        r"\w+",
        "and or not is are be if no none unknown wrong incorrect false untrue invalid mistaken maybe either neither "
        "but than plus minus times over divided "
        "of by squared cubed pi sqrt sin cos tan log ln exp mod infinity factorial choose half third quarter because",
    )
)
_LETTERS = frozenset("mgshlLNJWVAKCF")
"""Letters that are units behind a space; others, and all of them behind a digit (5m), are factors."""
_GLUED = frozenset(["mm", "cm", "dm", "km", "kg", "ft", "yd", "lb", "oz", "hr", "hz"])
"""Units of two letters that are no product behind a digit either."""
_SPACED = _GLUED | frozenset(["mg", "ml", "cl", "dl", "mi", "in", "ms", "ha", "kw"])
_WORDS = re.compile(r"[A-Za-z°$€£¢%][A-Za-z°$€£¢%'’.-]*(?:\^\{?[23]\}?|[²³])?|/")
MAX_WORDS = 5


@dataclass(frozen=True)
class Unit:
    """A known unit has a dimension and a size in the dimension's own unit; another one is its words."""

    words: tuple[str, ...] = ()
    dimension: str = ""
    size: Fraction = Fraction(1)
    factor: int = 1
    """What the number is to be multiplied by: 1000 for "thousand eggs" """


NO_UNIT = Unit()


def read_unit(text: str, *, spaced: bool) -> Unit | None:
    """The unit that these words name; None where they are no unit.

    spaced: stands apart from the number; otherwise only some known units count, as in 5cm. In \\text{} all count.
    """
    written = text
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).replace(" ^", "^").strip()
    text = text[:-1] if text[-2:-1].isalpha() and text.endswith(".") else text
    words = [word.lower() if len(word) > 1 else word for word in _WORDS.findall(text)]
    if "".join(_WORDS.findall(text)) != re.sub(r"\s", "", text) or len(words) > MAX_WORDS:
        return None
    if any(word in _NOT_IN_UNITS for word in words):
        return None
    is_text = "\\text" in written
    factor = 1
    while words and words[0].rstrip("s") in SCALES:
        factor *= SCALES[words.pop(0).rstrip("s")]
    if words and words[0] == "of":
        words.pop(0)
    known = _measure(words)
    if words and not is_text and not _is_no_product(words, spaced=spaced, is_known=known is not None):
        return None
    if known is not None:
        return Unit(tuple(words), known[0], known[1], factor)
    if words and len(words[0]) == 1:
        return None
    return Unit(tuple(_singular(word) for word in words), "", Fraction(1), factor)


def _is_no_product(words: list[str], *, spaced: bool, is_known: bool) -> bool:
    """Whether words outside \\text{} are a unit and no factors: 5 m, 5cm, 5 eggs, but not 5m, 5x^2, 5 xy."""
    name = re.sub(r"[^a-zA-Z].*", "", words[0])
    if is_known and len(name) != 2:
        return len(name) != 1 or (spaced and name in _LETTERS)
    if is_known:
        return name in (_SPACED if spaced else _GLUED)
    in_order = all(first < second for first, second in pairwise(name))
    return spaced and (len(name) > 3 or (len(name) == 3 and not in_order))


def convert(unit: Unit, to: Unit) -> Fraction | None:
    """How many of `to` one of `unit` is; 1 where one of them is missing; None where they are different things."""
    if not unit.words or not to.words:
        return Fraction(1)
    if unit.dimension or to.dimension:
        return unit.size / to.size if unit.dimension == to.dimension else None
    return Fraction(1) if set(unit.words) & set(to.words) else None


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def _measure(words: list[str]) -> tuple[str, Fraction] | None:
    """Dimension and size of units known to sympy, multiplied and divided ("km / h", "square feet"); None for others."""
    if len(words) == 1 and _singular(words[0]) in _MONEY:
        return "money", Fraction(_MONEY[_singular(words[0])])
    words = [part for word in words for part in _SHORT.get(_singular(word), word).split()]
    if not words:
        return None
    dimension: dict[str, int] = {}
    size, sign, power = Fraction(1), 1, 1
    for word in words:
        if word in ("per", "/"):
            sign = -1
        elif word in ("square", "cubic"):
            power = {"square": 2, "cubic": 3}[word]
        else:
            exponent = re.search(r"(?:\^\{?([23])\}?|([²³]))$", word)
            name = word[: exponent.start()] if exponent else word
            if exponent:
                power = int((exponent.group(1) or exponent.group(2)).translate(str.maketrans("²³", "23")))
            name = _SHORT.get(_singular(name), name)
            unit = getattr(sympy_units, name, None) or getattr(sympy_units, _singular(name), None)
            if not isinstance(unit, Quantity) or not unit.scale_factor.is_Rational:
                if name not in ("degree", "degrees"):
                    return None
                parts, scale = {"angle": 1}, Fraction(1)
            else:
                found = SI.get_dimension_system().get_dimensional_dependencies(unit.dimension)
                parts = {str(key): int(value) for key, value in found.items()}
                scale = Fraction(int(unit.scale_factor.p), int(unit.scale_factor.q))
            for key, value in parts.items():
                dimension[key] = dimension.get(key, 0) + sign * power * value
            size *= scale ** (sign * power)
            power = 1
    if not dimension:
        return None
    return " ".join(f"{key}^{value}" for key, value in sorted(dimension.items())), size
