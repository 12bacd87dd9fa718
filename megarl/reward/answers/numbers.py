"""Numbers that are written out, read exactly."""

import re
from dataclasses import dataclass
from fractions import Fraction

from megarl.reward.answers.units import NO_UNIT, Unit, read_unit

_INTEGER = r"\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?: \d{3})+(?!\d)|\d+"
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)\s*(?P<money>\\?[$€£])?\s*(?P<sign2>-?)(?:"
    rf"(?:(?P<whole>\d+)\s*)?\\frac\s*\{{\s*(?P<sign3>-?)\s*(?P<top>{_INTEGER})\s*\}}\s*\{{\s*(?P<bottom>{_INTEGER})\s*\}}"
    r"|(?:(?P<whole2>\d+)[ -])?(?P<top2>\d+)\s*/\s*(?P<bottom2>\d+)"
    r"|(?P<leading>\d*)\.(?P<fixed>\d*)\\overline\{(?P<repeated>\d+)\}"
    rf"|(?P<digits>(?:{_INTEGER})(?:\.\d+)?|\.\d+)"
    r"(?:\s*(?:\\times|\\cdot|\*|x)\s*10\s*(?:\^|\*\*)\s*\{?\s*(?P<ten>[-+]?\d{1,3})\s*\}?(?!\d)|[eE](?P<e>[-+]?\d{1,3})(?![\w.]))?"
    r")"
)
_BASE = re.compile(
    r"(?P<sign>-?)\s*[({]?(?P<digits>[0-9A-Z]+)[)}]?_\{?\(?(?:\\text\{)?\s*"
    r"(?P<base>\d+|two|three|four|five|six|seven|eight|nine|ten)\}?\)?\}?$"
)
_BASES = dict(zip(["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"], range(2, 11), strict=True))


@dataclass(frozen=True)
class Number:
    """A number that is written out: 122, 1,000, 0.5, 3 1/2, 1.2 x 10^3, 50%, $18, 7 cm."""

    value: Fraction
    form: str
    """integer, decimal, fraction or mixed"""
    is_percent: bool = False
    unit: Unit = NO_UNIT

    @property
    def share(self) -> Fraction:
        """The value, with a percent as a hundredth."""
        return self.value / 100 if self.is_percent else self.value

    @property
    def base(self) -> str:
        """The base that is written behind the digits; empty for base 10."""
        return self.unit.words[1] if self.unit.words[:1] == ("base",) and self.unit.words != ("base", "10") else ""


def read_number(text: str) -> Number | None:
    if found := _BASE.fullmatch(re.sub(r"^\\text\{\s*(\w+)\s*\}(?=\s*_)", r"\1", text)):
        return _read_in_base(found["sign"] + found["digits"], found["base"])
    found = _NUMBER.match(text)
    if found is None:
        return None
    get = found.groupdict()
    try:
        value, form = _evaluate(get)
    except (ValueError, ZeroDivisionError):
        return None
    negative = [get["sign"], get["sign2"], get["sign3"]].count("-")
    if negative > 1:
        return None
    rest = text[found.end() :]
    is_percent = rest.lstrip().startswith("%")
    rest = rest.lstrip()[1:] if is_percent else rest
    unit = read_unit(rest, spaced=rest[:1] == " ")
    if unit is None:
        return None
    if get["money"] and not unit.dimension:
        unit = Unit(("dollars",), "money", Fraction(1), unit.factor) if "$" in get["money"] else Unit((get["money"],))
    value = (-value if negative else value) * unit.factor
    return Number(value, form, is_percent, unit)


def _evaluate(get: dict[str, str | None]) -> tuple[Fraction, str]:
    def integer(name: str) -> int:
        return int(re.sub(r"[ ,]", "", get[name] or "0"))

    for suffix in ("", "2"):
        if get["bottom" + suffix]:
            whole = get["whole" + suffix]
            value = Fraction(integer("top" + suffix), integer("bottom" + suffix))
            return (value + integer("whole" + suffix), "mixed") if whole else (value, "fraction")
    if get["repeated"]:
        fixed, repeated = get["fixed"] or "", get["repeated"]
        nines = (10 ** len(repeated) - 1) * 10 ** len(fixed)
        return integer("leading") + Fraction(int(fixed + repeated) - int(fixed or "0"), nines), "decimal"
    digits = re.sub(r"[ ,]", "", get["digits"] or "")
    value = Fraction(digits) * Fraction(10) ** int(get["ten"] or get["e"] or 0)
    return value, "integer" if digits.isdigit() and not get["ten"] and not get["e"] else "decimal"


def _read_in_base(digits: str, base: str) -> Number | None:
    number = _BASES.get(base) or int(base)
    try:
        return Number(Fraction(int(digits, number)), "integer", False, Unit(("base", str(number))))
    except ValueError:
        return None
