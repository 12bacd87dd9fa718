"""Mathematical answers: which parts of a response state one, what it means, and whether it is the expected one.

First the text alone, in searches that are linear in its length; then what a stated answer means; last the verdict:
equal, of its kind, and as evaluated.
"""

import ast
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, islice, pairwise
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import latex2sympy
from math_verify.grader import should_treat_as_complex
from sympy.physics import units as sympy_units
from sympy.physics.units.quantities import Quantity
from sympy.physics.units.systems.si import SI

_TABLE = (
    "− - – - × \\times* · \\cdot* ⋅ \\cdot* ÷ / π \\pi* ∞ \\infty* ≤ \\le* ≥ \\ge* ≠ \\ne* ∪ \\cup* ∈ \\in* ± \\pm*"
    " ℝ \\mathbb{R} ½ \\frac{1}{2} ¼ \\frac{1}{4} ¾ \\frac{3}{4} ⟨ \\langle* ⟩ \\rangle* ² ^{2} ³ ^{3} ≈ \\approx*"
    " ∅ \\emptyset* √ \\sqrt* \u00a0 * θ \\theta*"
)
"""Signs, each followed by what it is in LaTeX, with * for the space behind a command"""
_SIGNS = _TABLE.split(" ")
_UNICODE = {sign: latex.replace("*", " ") for sign, latex in zip(_SIGNS[::2], _SIGNS[1::2], strict=True)}
_REMOVED = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|limits|(?:[bB]ig|[bB]igg)[lr]?)(?![a-zA-Z])\.?|(?<!\\)\\(?:[,;:>]|!\s*)|(?<!\\)\$"
    r"|(?<=\\\\)\[-?[\d.]+ ?[a-z]{2}\]|\\(?:tag|label)\{[^{}]*\}|\*\*|(?<!\w)`(?=\S)|(?<=\S)`(?!\w)"
)
_POWER = re.compile(r"(?<=[\w)\]}])(\*\*|\s+\*\*\s+)(?=[-+]?(?:[\w({]|\.\d|\\[a-zA-Z]))")
"""Between two operands ** is a power; any other one is bold."""
_EMPHASIS = re.compile(r"(?<!\S)(?<![\d)\]}]\s)(\*|__?)(?=\S)([^*_]*)(?<=\S)\1(?!\w)")
_RENAMED = [
    (r"\\[dtc]frac(?![a-z])", r"\\frac"),
    (r"\\(?:text(?:bf|rm|it|normal|sf)?|mathrm|mathbf|mathit|mbox|operatorname\*?)\s*\{([^{}]*)\}", r"\\text{\1}"),
    (r"\\text\{([^{}A-Za-z°%$€]*)\}", r"\1"),
    (r"(?<![\d}])(?<!\d )\\text\{\s*([A-Za-z])\s*\}(?=\s*[=^_(])", r"\1"),
    (r"(?<!\\)\\(?:quad|qquad|hspace\{[^{}]*\}|space|enspace| )|~", r" "),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"\\frac\s*\{([^{}]*)\}\s*(\d)", r"\\frac{\1}{\2}"),
    (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
    (r"\\sqrt\s*(\d+)", r"\\sqrt{\1}"),
    (r"\\leqs?l?a?n?t?(?![a-z])", r"\\le "),
    (r"\\geqs?l?a?n?t?(?![a-z])", r"\\ge "),
    (r"\\lt(?![a-z])", r"<"),
    (r"\\gt(?![a-z])", r">"),
    (r"<=", r"\\le "),
    (r">=", r"\\ge "),
    (r"\\neq(?![a-z])|!=|\\not\s*=", r"\\ne "),
    (r"(?i)\\varnothing(?![a-z])|\\\{\s*\\\}|^\s*(?:\\text\{\s*)?(?:the\s+)?empty set\W*$", r"\\emptyset "),
    (r"\{,\}", r","),
    (r"[\[(]\s*\\begin\{array\}\{[^{}]*\}(.*?)\\end\{array\}\s*[\])]", r"\\begin{pmatrix}\1\\end{pmatrix}"),
    (r"\^\s*\{?\s*\\?(?:circ|degree)(?![a-z])\s*\}?|\\degree(?![a-z])", r"°"),
    (r"\\%|\\text\{\s*(?:percent|%|\\%)\s*\}|(?<=\d)\s*percent(?:age)?\b", r"%"),
    (r"(?<=[\d}])\\text", r" \\text"),
]
WITHDRAWN = (
    r"(?:incorrect|wrong|false|untrue|invalid|inaccurate|mistaken|erroneous|rejected|discarded|extraneous|impossible"
    r"|withdrawn|retracted|refuted|disproved|superseded|revised|spurious|dubious|fallacious|suspect|nonsense|bogus|bad|nope|fail(?:s|ed)|doubtful|unlikely"
    r"|(?:crossed|ruled) out|excluded|too (?:large|small|big|high|low|many|much|few|long|short)|off by \w+"
    r"|contradict(?:ion|ory)|an? (?:mistake|error|contradiction)"
    r"|not (?:right|correct|the answer|it|valid|true|an? (?:solution|answer)|possible|allowed))"
)
"""What is said of an answer that is taken back."""
_NUMERALS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_NOTE = re.compile(
    r"(?<=\S)\s+\((?:(?:correct|verified|exact(?:ly)?|total|altogether|(?:final )?answer|[ck]?m|k?g|ft|min|mph)(?=\))"
    r"|rounded|approx(?:imately)?|in|per|each|to|for|including|not counting|since|because|as|by|with|from"
    r"|(?!(?:over|under|double)?counts|contradicts|violates|exceeds|misleads|misses|fails|omits|breaks|ignores|loses)"
    rf"[a-z]*(?<![su])s(?= (?:per|in|of|each|total|left|old)\b|\))|(?P<numeral>{'|'.join(_NUMERALS)})(?=\)))"
    r"\b[A-Za-z ,-]*\)$",
    re.I,
)
"""What a remark in brackets may say: which unit, per what, why. Any other one may take the answer back."""
_DOUBT = re.compile(
    rf"\b(?:{WITHDRAWN}|mistakes?|errors?|not(?! counting)|never|isn|wasn|maybe|perhaps|possibly|probably|guess(?:es)?"
    r"|nonsense|unsure|uncertain|unclear|no|if|but|doubt|however|wait|ignore|scratch|should|cannot|can|be|does|lies|needs|was|is)\b",
    re.I,
)
_APPROXIMATELY = re.compile(r"^(?:\\approx|approximately|about|exactly|only|simply|just|equal to|\\text\{\s*\}|:|=)\s*")


def clean(text: str) -> str:
    """The text in one way of writing: without $, sizes, spaces of LaTeX and bold; Unicode signs as LaTeX."""
    money = re.match(r"\s*(?:\*\*)?\$\s?\d[\d,]*(?:\.\d+)?(?![\d$])(?!.*\$)", text)
    text = text.replace("$", "\\$", 1) if money else text
    for sign, latex in _UNICODE.items():
        text = text.replace(sign, latex)
    text = _EMPHASIS.sub(r"\2", _POWER.sub("^", text))
    text = _REMOVED.sub(lambda match: " " if match.group(0) in ("\\,", "\\;", "\\:") else "", text)
    text = re.sub(r"(?<=\d) (?=\d{3}(?!\d))", ",", text) if re.fullmatch(r"[-\d ]+", text.strip()) else text
    for pattern, new in _RENAMED:
        text = re.sub(pattern, new, text)
    text = re.sub(r"\\[()\[\]]", " ", text)
    text = re.sub(r"\s+", " ", text).strip()
    if not re.search(r"\.\.|…|\\[lc]?dots", text[-6:]):
        text = text.rstrip(".,;:").strip()
    while found := _APPROXIMATELY.match(text):
        text = text[found.end() :]
    note = _NOTE.search(text)
    if note is None or _DOUBT.search(note.group(0)):
        return text
    value = text[: note.start()]
    is_other = note["numeral"] and not value.endswith(str(_NUMERALS.index(note["numeral"].lower()) + 1))
    return text if is_other else value


_DEPTH = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


def split(text: str, separator: re.Pattern[str]) -> Iterator[str]:
    """The parts between separators that stand in no brackets."""
    start = depth = position = 0
    while position < len(text):
        if depth == 0 and (found := separator.match(text, position)) and found.end() > found.start():
            yield text[start:position]
            start = position = found.end()
            continue
        if text.startswith("\\text{", position):
            position = text.find("}", position) + 1 or len(text)
            continue
        if text[position] == "\\" and text[position + 1 : position + 2] not in "{}":
            position += 1
        depth += _DEPTH.get(text[position : position + 1], 0)
        position += 1
    yield text[start:]


def is_one_group(text: str) -> bool:
    """Whether the first bracket closes with the last."""
    depth = 0
    for position, sign in enumerate(text):
        depth += _DEPTH.get(sign, 0)
        if depth == 0 and position < len(text) - 1 and text[position] in ")]}":
            return False
    return depth == 0


def measure_depth(text: str) -> int:
    return max(accumulate(_DEPTH.get(sign, 0) for sign in text), default=0)


MAX_CHARACTERS = 1000
"""A longer stated answer is not read."""
_TAGS = r"(?:think|thinking|thought|reasoning|reason|scratchpad|seed:think)"
_THINKING = re.compile(rf"<(/?){_TAGS}>|\[(/?)THINK\]|◁(/?)think▷")
_OPEN_THINKING = re.compile(rf"(?:<{_TAGS}>|\[THINK\]|◁think▷)\s*$")
_ANSWER_TAG = re.compile(rf"<answer>((?:(?!</?answer>).){{0,{MAX_CHARACTERS}}})</answer>", re.DOTALL)
MAX_MATCHES = 1000
"""A response with more boxes, statements or tags repeats itself without end and states no one answer."""
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_STATEMENT = re.compile(
    r"(?:\b(?:answer|correct (?:option|choice))\b(?:[ \t]+(?:to|for|of)[ \t]+(?:this|the|your|our)[ \t]+"
    r"(?:\w+[ \t]+)?(?:question|problem|exercise))?"
    r"[ \t*_`]*(?::|=|\bis\b|\bare\b|\bequals\b|\bmust be\b|\bshould be\b)[ \t*_`]*:?"
    r"(?:[ \t]*(?:therefore|thus|hence|then|indeed|clearly)\b,?)?"
    r"|^[ \t#*_]*(?:the[ \t]+)?(?:final[ \t]+)?answer[ \t*_]*$"
    r"|(?:^|(?<=[ \t]))\#\#\#\#[ \t]+(?=[-+$\\\d.(\[{√π]|[A-J]\b))",
    re.IGNORECASE | re.MULTILINE,
)
_NO_STATEMENT = re.compile(r"\\(?:boxed|fbox)\s*\{|^\W*not\b")
_SENTENCE_END = re.compile(r"(?<![\s.])[.!](?=[\s*_]|$)")
_REASON = re.compile(r"(?<!\s)[,;]?\s+\(?(?:because|since|as|which|where|so|therefore|thus|I hope)\b.*", re.DOTALL)
_TAKEN_BACK = re.compile(
    r"(?:\W|\\text\b)*(?:(?:is|was|are|would be|seems|looks)\b\W*n[o']?t\b|isn't|\?|[✗✘❌]"
    r"|(?:\b(?:but|however|wait|no|nope|hmm|actually|oh|that|this|which|it|I|oops|sorry|the|answer|result|value)\b\W*)*\b"
    r"(?:(?:is|was)n't (?:right|correct)|no(?=\W*$|\s*[.!,;:)\]}])"
    r"|(?:can(?:not|'t| not)|does(?:n't| not)) (?:be (?:right|correct|true|it)|work|hold|fit)\b"
    r"|(?<=\()(?:not\W*\)|mistake|error|ignore|should be|maybe|perhaps|possibly|probably|if\b|wait"
    r"|(?:just |only )?(?:a|my) (?:\w+ )?guess"
    r"|unsure|uncertain|unclear|to be checked)"
    rf"|(?:is|was|are|would be|seems|looks|must be|s|m)\b\W*{WITHDRAWN}\b"
    rf"|{WITHDRAWN}(?=\W*$|\s*[.!,;:)\]}}*\n])"
    r"|(?:scratch|ignore|disregard|forget|strike) (?:that|this|it)|never ?mind"
    r"|take (?:that|it|this) back|made an? (?:mistake|error)"
    r"|correction:))",
    re.IGNORECASE,
)
_SAID_WRONG = re.compile(
    r"\b(?:incorrect|wrong|false|mistaken|tempting|naive|(?:not|isn't) (?:an?|the|my))[ \t]+(?:final[ \t]+)?"
    r"(?:answer|result|value|choice|option)(?:[ \t]*(?:\b(?:is|was|would be)\b|[:=]))*[\s:*$({\\\[]*$",
    re.IGNORECASE,
)
_SUBJECT = re.compile(
    r"(?:the|its?|his|her|their|there)\b[^\d?]{0,200}?(?<!\w)(?:is|are|was|equals)[:\s*]+", re.IGNORECASE
)
"""What a sentence after "Answer:" says about its number: "The volume of $ABCD$ is"."""
_NEGATED = re.compile(r"(?:\bnot|n't|\bnever|\brather than|\binstead of)[\s:*$({\\\[]*$", re.IGNORECASE)
_HEDGE = re.compile(
    r"\?|\b(?:unknown|unclear|undetermined|cannot|can't|can not|not|maybe|perhaps|either|neither|unsure|if)\b", re.I
)
_LONE_NUMBER = re.compile(r"(?<![\w.,/*+×÷^=-])[-−]?(?:[$€£]\s?)?(?:\d[\d,]*)?\.?\d+(?:/\d+)?(?:\s?%)?(?![\d*/+×÷^])")
_MATH = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)


def extract_statements(text: str, mode: str) -> list[str] | None:
    """The texts that state an answer, in order; those taken back in their own sentence are left out.

    None where there are more than MAX_MATCHES.

    text: what comes after thinking. mode: with "boxed" final statements beside a box count (they may say another
    answer), but none without a box.
    """
    if any(any(islice(each.finditer(text), MAX_MATCHES, None)) for each in (_BOX, _STATEMENT, _ANSWER_TAG)):
        return None
    boxes = list(_find_boxes(text))
    if mode == "boxed" and not boxes:
        return []
    return [content for _, content in sorted(boxes + _find_final_statements(text))]


def remove_thinking(text: str, *, thinking: bool) -> str:
    """The text after the last thinking; empty where thinking does not end."""
    end = 0
    for tag in _THINKING.finditer(text):
        thinking = "/" not in tag.group(0)
        end = tag.end()
    return "" if thinking else _remove_end_tokens(text[end:])


def _remove_end_tokens(text: str) -> str:
    end = len(text)
    while True:
        while end and text[end - 1].isspace():
            end -= 1
        found = re.search(r"(?:<\|[^|<>]{1,40}\|>|</s>)$", text[max(0, end - 44) : end])
        if found is None:
            return text[:end]
        end -= len(found.group(0))


def find_last_value(text: str) -> str | None:
    """The last number or formula of the last sentence, unless the sentence asks or doubts."""
    lines = text.strip().splitlines() or [""]
    sentence = re.split(r"(?<=[.!?])\s+(?=\S)", lines[-1].strip())[-1]
    if _HEDGE.search(sentence):
        return None
    found = [(m.end(), next(filter(None, m.groups()))) for m in _MATH.finditer(sentence)]
    found += [(m.end(), m.group(0)) for m in _LONE_NUMBER.finditer(re.sub(r"=\s*", "= ", sentence))]
    return max(found)[1] if found else None


def _find_boxes(text: str) -> Iterator[tuple[int, str]]:
    """Start and content of each box that is closed and not taken back in its sentence."""
    position = 0
    while match := _BOX.search(text, position):
        end = _find_closing_brace(text, match.end())
        if end is None:
            return
        position = end
        before, after = text[max(0, match.start() - 40) : match.start()], text[end : end + 60]
        if not _TAKEN_BACK.match(after) and not _NEGATED.search(before) and not _SAID_WRONG.search(before):
            yield match.start(), text[match.end() : end - 1]


def _find_closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text[start : start + 4 * MAX_CHARACTERS], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace.group(0), 0)
        if depth == 0:
            return start + brace.end()
    return None


def _find_final_statements(text: str) -> list[tuple[int, str]]:
    """What follows "the answer is", "Answer:", "####" or stands in <answer>; one that holds a box is the box."""
    tagged = [(match.start(), match.end(), match.group(1).strip()) for match in _ANSWER_TAG.finditer(text)]
    found = [(start, content) for start, end, content in tagged if not _TAKEN_BACK.match(text[end : end + 60])]
    for match in _STATEMENT.finditer(text):
        if not any(start <= match.start() < end for start, end, _ in tagged):
            content, after = _cut(text[match.end() : match.end() + 4 * MAX_CHARACTERS])
            is_denied = _SAID_WRONG.search(text[max(0, match.start() - 40) : match.end()])
            if content and not is_denied and not _TAKEN_BACK.match(after):
                found.append((match.start(), content))
    return [(start, content) for start, content in found if content and not _NO_STATEMENT.search(content)]


def _cut(text: str) -> tuple[str, str]:
    """The statement at the start of the text, the line up to the sentence's end, and what follows."""
    text = text.lstrip()
    line = text.split("\n", 1)[0]
    if sentence_end := _SENTENCE_END.search(line):
        line = line[: sentence_end.start()]
    line = _REASON.sub("", line).strip(" \t*_`")
    start = found.end() if (found := _SUBJECT.match(line)) else 0
    end = text.find(line) + len(line)
    return line[start:], text[end : end + 60]


SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_MONEY = {
    **dict.fromkeys(["$", "dollar", "usd", "buck"], Fraction(1)),
    **dict.fromkeys(["cent", "¢"], Fraction(1, 100)),
}
_SHORT = {"mins": "minute", "min": "minute", "sec": "second", "hr": "hour", "yr": "year", "deg": "degree"}
_SHORT |= {"°": "degree", "in": "inch", "inche": "inch", "feet": "foot", "lb": "pound", "litre": "liter"}
_SHORT |= {"metre": "meter", "centimetre": "centimeter", "kilometre": "kilometer", "ml": "milliliter", "sq": "square"}
_SHORT |= {"mph": "mile per hour", "kph": "kilometer per hour", "kmh": "kilometer per hour", "€": "euro"}
_NOT_IN_UNITS = re.compile(
    r"(?:and|or|not|is|are|be|if|no|none|unknown|wrong|incorrect|false|untrue|invalid|mistaken|maybe|either|neither|but|than"
    r"|plus|minus|times|over|divided|of|by|squared|cubed|pi|sqrt|sin|cos|tan|log|ln|exp|mod|infinity|factorial|choose|half"
    r"|third|quarter|because)"
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
    if any(map(_NOT_IN_UNITS.fullmatch, words)):
        return None
    is_text = "\\text" in written
    factor = 1
    while words and words[0].rstrip("s") in SCALES:
        factor *= SCALES[words.pop(0).rstrip("s")]
    known = _measure(words)
    if words and not is_text and not _is_no_product(words, spaced=spaced, is_known=known is not None):
        return None
    if known is not None:
        return Unit(tuple(words), known[0], known[1], factor)
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
        return "money", _MONEY[_singular(words[0])]
    words = [part for word in words for part in _SHORT.get(_singular(word), word).split()]
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
        base = _BASES.get(found["base"]) or int(found["base"])
        try:
            value = Fraction(int(found["sign"] + found["digits"], base))
        except ValueError:
            return None
        return Number(value, "integer", False, Unit(("base", str(base))))
    found = _NUMBER.match(text)
    if found is None:
        return None
    get = found.groupdict()
    try:
        value, form = _evaluate(get)
    except (ValueError, ZeroDivisionError):
        return None
    negative = [get["sign"], get["sign2"], get["sign3"]].count("-") % 2
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


MAX_DEPTH = 20
"""Brackets in one another; deeper ones are not read."""
MAX_FORMULA = 400
"""Characters that latex2sympy is given; it needs about 10 ms for each where it recovers from errors."""
MAX_BITS = 100_000
"""Size of a number when evaluated; larger powers are not read."""
_RELATION = re.compile(r"\\le(?![a-z])|\\ge(?![a-z])|<|>")
_NAME = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?'*(?:\([a-z]\))?$")
_PLUS_MINUS = re.compile(r"\\pm(?![a-z])")
_MODULUS = re.compile(
    r"(?<!\s)\s*(?:\(\s*)?(?:\\[bp]?mod|(?<![a-zA-Z\\])mod|\\text\{\s*\(?\s*mod\s*\})\s*(?:\{\s*(\w+)\s*\}|(\d+|[a-z]))\s*\)?$"
)
_JOINED = re.compile(
    r"\s*(?:,\s*)?(?:\\text\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))\s*|\s*[,;]\s*"
)
_PLAIN_FUNCTION = re.compile(r"(?<![\\a-zA-Z])(sqrt|pi|sin|cos|tan|log|ln|infty|theta|alpha|beta)(?![a-zA-Z])")
_PROSE = re.compile(r"(?<![\\{a-zA-Z])[a-zA-Z]{4,}.*\d|\d.* [a-zA-Z]{4,} .*\d")
_WORD = re.compile(r"(?<![\\a-zA-Z])(?!cdot|times)[a-zA-Z]{4,}|[^\x00-\x7f]")
_UNREADABLE = re.compile(
    r"[\^_]\s*\\?\w+\s*[\^]\s*\\?\w+\s*\^|_\w+\s*_|\\binom.*\d{4}|\d{4}.*\\binom|\\binom.*\^|--|=\s*=|\\text|[\d)}]\s*_"
)
"""Double superscripts and subscripts, subscripts of numbers, which latex2sympy drops, and binomials too large to be
evaluated, which it does at once."""


@dataclass(frozen=True)
class Expression:
    """Anything else that latex2sympy reads, as written (not evaluated)."""

    tree: Any
    latex: str
    unit: Unit = NO_UNIT


@dataclass(frozen=True)
class Items:
    """Several answers in brackets: {} for a set, "" for a list, (), [], [) and (] for tuples or intervals."""

    brackets: str
    items: "tuple[Answer, ...]"


@dataclass(frozen=True)
class Region:
    """A set of real numbers."""

    set: Any
    name: str = ""
    """What lies in it (x, f(x)), where that is said."""


@dataclass(frozen=True)
class Equation:
    """name = value; earlier sides of a chain are in `sides`, as text."""

    sides: tuple[str, ...]
    value: "Answer"


Answer = Number | Expression | Items | Region | Equation


def read_answer(text: str) -> Answer | None:
    """What the text says as mathematics; None where it says nothing, or in more than MAX_CHARACTERS."""
    if len(text) > MAX_CHARACTERS or measure_depth(text) > MAX_DEPTH:
        return None
    return _read(clean(text))


def _read(text: str) -> Answer | None:
    text = text.strip()
    if not text:
        return None
    if (number := read_number(text)) is not None:
        return number
    if found := _MODULUS.search(text):
        name, is_congruent, rest = text[: found.start()].rpartition("\\equiv")
        value = _read(rest)
        if not isinstance(value, Number) or value.unit != NO_UNIT or (is_congruent and not _NAME.match(name.strip())):
            return None
        value = replace(value, unit=Unit((f"mod {found.group(1) or found.group(2)}",)))
        return Equation((name.strip(),), value) if is_congruent else value
    num_signs = len(_PLUS_MINUS.findall(text))
    if num_signs > 2:
        return None
    if num_signs:
        return _read_items("", [_PLUS_MINUS.sub(sign, text, count=1) for sign in ("+", "-")])
    parts = list(split(text, _JOINED))
    if len(parts) > 1:
        items = _read_items("", parts)
        words = " or " in text or "\\text{ or" in text
        return _unite(items) if words and items and any(isinstance(i, Region) for i in items.items) else items
    exact, *decimals = split(text, re.compile(r"\\approx(?![a-z])"))
    return _read_approximation(exact.strip(), decimals[0]) if len(decimals) == 1 else _read_one(text)


def _read_approximation(exact: str, decimals: str) -> Answer | None:
    """The exact value where the decimals are about it (12 pi ~ 37.7); the decimals where it is but a name (x ~ 2.5)."""
    value, rounded = _read(exact), _read(decimals)
    numbers = [_as_sympy(each.value if isinstance(each, Equation) else each) for each in (value, rounded)]
    if None not in numbers:
        return value if abs(numbers[0] - numbers[1]) <= abs(numbers[0]) / 100 else None
    return Equation((exact,), rounded) if rounded and _NAME.match(exact) else None


def _read_one(text: str) -> Answer | None:
    """An answer that is no list."""
    sides = list(split(text, re.compile(r"(?<![<>!:])=")))
    if len(sides) > 1:
        value = _read(sides[-1])
        if any(_PROSE.search(side) for side in sides):
            return None
        return Equation(tuple(side.strip() for side in sides[:-1]), value) if value and all(sides) else None
    if found := re.match(r"(\\?[a-zA-Z](?:_\w)?)\s*\\in(?![a-z])", text):
        region = to_region(_read(text[found.end() :]))
        return replace(region, name=found.group(1)) if region else None
    pieces = list(split(text, re.compile(r"\\cup(?![a-z])")))
    if len(pieces) > 1:
        items = _read_items("", pieces)
        return _unite(items) if items else None
    if _RELATION.search(text):
        return _read_inequality(text)
    return _read_bracketed(text) or _read_expression(text)


def _read_items(brackets: str, parts: list[str]) -> Items | None:
    items = [_read(part) for part in parts]
    return Items(brackets, tuple(item for item in items if item)) if all(items) else None


def _read_bracketed(text: str) -> Answer | None:
    """A set, tuple or interval; single round brackets around one answer are left out."""
    text = text.replace("\\langle", "(").replace("\\rangle", ")")
    for opening, closing in (("\\{", "\\}"), ("(", ")"), ("[", "]"), ("(", "]"), ("[", ")"), ("{", "}")):
        if text.startswith(opening) and text.endswith(closing) and is_one_group(text):
            inside = text[len(opening) : -len(closing)]
            parts = list(split(inside, re.compile(r"[,;]")))
            if len(parts) == 1 and opening in "({":
                return _read(inside)
            brackets = (opening + closing).replace("\\", "")
            return _read_items(brackets, parts) if inside.strip() else None
    return None


def _read_inequality(text: str) -> Answer | None:
    """A solved inequality (a variable between closed numbers) as a region; any other one as it is."""
    sides = [side.strip() for side in split(text, _RELATION)]
    signs = [found.group(0) for found in _RELATION.finditer(text)]
    names = [position for position, side in enumerate(sides) if _NAME.match(side)]
    if len(names) != 1 or len(sides) != len(signs) + 1 or len(sides) > 3 or (len(sides) == 3 and names != [1]):
        return _read_expression(text)
    region: Any = sympy.S.Reals
    for position, sign in enumerate(signs):
        bound = _as_sympy(_read(sides[position + 1 if names[0] == position else position]))
        if bound is None:
            return None
        is_upper = ("l" in sign or sign == "<") == (names[0] == position)
        is_open = sign in "<>"
        half = sympy.Interval(-sympy.oo, bound, True, is_open) if is_upper else sympy.Interval(bound, sympy.oo, is_open)
        region = region.intersect(half)
    return Region(region, re.sub(r"[\s{}]|\([a-z]\)", "", sides[names[0]]))


def _unite(items: Items) -> Region | None:
    regions = [to_region(item) for item in items.items]
    names = {region.name for region in regions if region} - {""}
    if not all(regions) or len(names) > 1:
        return None
    return Region(sympy.Union(*(region.set for region in regions if region)), "".join(names))


def to_region(answer: Answer | None) -> Region | None:
    """An interval, a set of numbers, R or an inequality as a set; None for anything else."""
    if isinstance(answer, Region):
        return answer
    if isinstance(answer, Expression) and isinstance(answer.tree, sympy.Set):
        return Region(answer.tree)
    if not isinstance(answer, Items):
        return None
    values = [_as_sympy(item) for item in answer.items]
    if any(value is None or not value.is_extended_real for value in values):
        return None
    if answer.brackets == "{}":
        return Region(sympy.FiniteSet(*values))
    if len(values) != 2 or answer.brackets not in ("()", "[]", "(]", "[)") or not values[0] < values[1]:
        return None
    return Region(sympy.Interval(*values, answer.brackets[0] == "(", answer.brackets[1] == ")"))


def _as_sympy(answer: Answer | None) -> Any:
    """The value of a number or expression without symbols; None for others and for one with a unit that has a size."""
    if isinstance(answer, Number | Expression) and answer.unit.dimension:
        return None
    if isinstance(answer, Number):
        return sympy.Rational(answer.share)
    if isinstance(answer, Expression) and isinstance(answer.tree, sympy.Expr) and not answer.tree.free_symbols:
        return make_exact(answer.tree)
    return None


def make_exact(tree: Any) -> Any:
    """The tree with decimals as fractions, and evaluated where sympy does so by itself."""
    floats = {number: sympy.Rational(str(number)) for number in tree.atoms(sympy.Float)}
    return tree.xreplace(floats).doit(deep=True) if floats else tree.doit(deep=True)


def _read_expression(text: str) -> Expression | None:
    formula, unit = _split_unit(text)
    latex = _to_latex(formula)
    if not 0 < len(latex) <= MAX_FORMULA or _UNREADABLE.search(latex):
        return None
    if _WORD.search(re.sub(r"\\[a-zA-Z]+\*?|\{[pbvBV]?matrix\}", " ", latex)):
        return None
    try:
        tree = latex2sympy(
            latex, is_real=not should_treat_as_complex(latex), convert_degrees=False, normalization_config=None
        )
        if tree is None or _count_bits(tree) > MAX_BITS:
            return None
    except MemoryError:
        raise
    except Exception:  # latex2sympy raises Exception itself, and many kinds of errors for what it cannot read.
        return None
    return Expression(tree, latex, unit or NO_UNIT)


def _split_unit(text: str) -> tuple[str, Unit | None]:
    """The formula and the unit behind it; no formula where words behind it are no unit."""
    found = re.search(
        r"(?:°|\s*(?:\\text\{[^{}]*\}(?:\^\{?[23]\}?)?\s*)+|(?<=[\d})i]) [a-z]{2,}(?: [a-z]+)*(?:\^\{?[23]\}?)?)$", text
    )
    if found is None or not found.start():
        return text, None
    unit = read_unit(found.group(0), spaced=True)
    return (text[: found.start()], unit) if unit else ("", None)


def _to_latex(text: str) -> str:
    text = text.replace("*", "\\cdot ")
    while found := re.search(r"\\?(?<![a-zA-Z])exp\s*(?=[({])", text):
        ends = (end for end in range(found.end() + 2, len(text) + 1) if is_one_group(text[found.end() : end]))
        end = next(ends, 0)
        if not end:
            break
        text = f"{text[: found.start()]}e^{{{text[found.end() + 1 : end - 1]}}}{text[end:]}"
    text = _PLAIN_FUNCTION.sub(r"\\\1 ", text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"\^\s*\(([^()]*)\)", r"^{\1}", text)
    text = re.sub(r"\^\s*(-?\d+)", r"^{\1}", text)
    text = re.sub(r"(?<![a-zA-Z\\])(?:inf|infinity|oo)(?![a-zA-Z])", r"\\infty ", text)
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)


def _count_bits(tree: Any) -> float:
    """About how many bits the number has when evaluated; symbols count as a few."""
    if isinstance(tree, sympy.Integer):
        return float(abs(tree.p).bit_length())
    bits = [_count_bits(part) for part in (tree if isinstance(tree, sympy.MatrixBase) else tree.args)]
    if isinstance(tree, sympy.Pow) and len(bits) == 2:
        return bits[0] * math.exp2(min(bits[1], 60.0))
    if isinstance(tree, sympy.exp) and tree.exp.is_polynomial():
        return sum(bits) + 4  # nothing to evaluate, as in e^{x^2}
    if isinstance(tree, sympy.factorial | sympy.exp):
        return math.exp2(min(bits[0], 60.0)) * (bits[0] + 1)
    return sum(bits) + 4


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
        return _equals_curve(gold, answer)
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
_UNMARKED_PROSE = re.compile(r"(?<![\\\w{])(?!sqrt|sin|cos|tan|log|ln|pi)[A-Za-z]{2,} ")
"""A word in a response that is not marked as an answer; letters would be factors."""
_ONLY_WORDS = re.compile(r"[A-Za-z][A-Za-z '.-]*[A-Za-z.]")
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
    if statements == [whole] and isinstance(readings[0], Expression) and _UNMARKED_PROSE.search(whole):
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
    if not _ONLY_WORDS.fullmatch(text) or text in ("pi", "infinity"):
        return False
    return " " in text or len(text) > 3 or not set(text.lower()) <= _SYMBOLS


def _fold(text: str) -> str:
    """Words without case, spaces, quotes and a full stop at the end."""
    return re.sub(r"\s+|[\"'`]|\\[,; ]|[{}$]", "", strip_text(text)).casefold().rstrip(".!")


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
    """Make sympy, which turns text into Python source and evaluates it, refuse all but arithmetic, names and common
    functions with ValueError."""
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
            # Function('f')(...) is how sympy writes a function it does not know.
            called, allowed = node.func, FUNCTIONS
            if isinstance(called, ast.Call):
                called, allowed = called.func, frozenset({"Function"})
            if not isinstance(called, ast.Name) or called.id not in allowed:
                raise ValueError(f"{ast.unparse(node.func)} is not a function that an answer may use")
            if called is node.func and called.id in TEXT_TAKERS:
                texts.update(map(id, node.args))
        elif not isinstance(node, NODES):
            raise ValueError(f"{type(node).__name__} is not part of an answer")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in texts:
            raise ValueError("text is not part of an answer")


def build_math_scorer() -> Callable[..., dict[str, Any]]:
    """(golds, text, mode, prompt) -> {"correct", "read", "answer"}: of the first gold that is right, else the first."""
    guard_sympy()

    def score(golds: list[str], text: str, mode: str, prompt: str) -> dict[str, Any]:
        thinking = _OPEN_THINKING.search(prompt) is not None
        verdict = grade(golds[0], text, mode, thinking=thinking)
        for gold in golds[1:]:
            if not verdict.is_right and (other := grade(gold, text, mode, thinking=thinking)).is_right:
                verdict = other
        return {"correct": verdict.is_right, "read": verdict.is_read, "answer": verdict.answer}

    return score
