"""One way of writing for mathematical text: Unicode signs as LaTeX, no sizes, spaces, dollars and bold."""

import re
from collections.abc import Iterator

_UNICODE = {
    "−": "-",
    "–": "-",
    "×": "\\times ",
    "·": "\\cdot ",
    "⋅": "\\cdot ",
    "÷": "/",
    "π": "\\pi ",
    "∞": "\\infty ",
}
_UNICODE |= {"≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "∪": "\\cup ", "∈": "\\in ", "±": "\\pm ", "ℝ": "\\mathbb{R}"}
_UNICODE |= {"½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "⟨": "\\langle ", "⟩": "\\rangle "}
_UNICODE |= {
    "²": "^{2}",
    "³": "^{3}",
    "≈": "\\approx ",
    "∅": "\\emptyset ",
    "√": "\\sqrt ",
    "\u00a0": " ",
    "θ": "\\theta ",
}
_REMOVED = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|limits|(?:[bB]ig|[bB]igg)[lr]?)(?![a-zA-Z])\.?|(?<!\\)\\(?:[,;:>]|!\s*)|(?<!\\)\$"
    r"|(?<=\\\\)\[-?[\d.]+ ?[a-z]{2}\]|\\(?:tag|label)\{[^{}]*\}|\*\*|(?<!\w)`(?=\S)|(?<=\S)`(?!\w)"
)
_POWER = re.compile(r"(?<=[\w)\]}])(\*\*|\s+\*\*\s+)(?=[-+]?(?:[\w({]|\.\d|\\[a-zA-Z]))")
"""Between two operands ** is a power; any other one is bold."""
_EMPHASIS = re.compile(r"(?<!\S)(?<![\d)\]}]\s)(\*|__?)(?=\S)([^*_]*)(?<=\S)\1(?!\w)")
_RENAMED = [
    (re.compile(r"\\[dtc]frac(?![a-z])"), r"\\frac"),
    (
        re.compile(r"\\(?:text(?:bf|rm|it|normal|sf)?|mathrm|mathbf|mathit|mbox|operatorname\*?)\s*\{([^{}]*)\}"),
        r"\\text{\1}",
    ),
    (re.compile(r"\\text\{([^{}A-Za-z°%$€]*)\}"), r"\1"),
    (re.compile(r"(?<![\d}])(?<!\d )\\text\{\s*([A-Za-z])\s*\}(?=\s*[=^_(])"), r"\1"),
    (re.compile(r"(?<!\\)\\(?:quad|qquad|hspace\{[^{}]*\}|space|enspace| )|~"), " "),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*\{([^{}]*)\}\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*(\d)\s*\{"), r"\\frac{\1}{"),
    (re.compile(r"\\sqrt\s*(\d+)"), r"\\sqrt{\1}"),
    (re.compile(r"\\leqs?l?a?n?t?(?![a-z])"), r"\\le "),
    (re.compile(r"\\geqs?l?a?n?t?(?![a-z])"), r"\\ge "),
    (re.compile(r"\\lt(?![a-z])"), "<"),
    (re.compile(r"\\gt(?![a-z])"), ">"),
    (re.compile(r"<="), r"\\le "),
    (re.compile(r">="), r"\\ge "),
    (re.compile(r"\\neq(?![a-z])|!="), r"\\ne "),
    (re.compile(r"\\not\s*="), r"\\ne "),
    (re.compile(r"\\var(?=(?:epsilon|phi|theta)(?![a-z]))"), r"\\"),
    (re.compile(r"\\lbrace(?![a-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![a-z])"), r"\\}"),
    (
        re.compile(r"\\varnothing(?![a-z])|\\\{\s*\\\}|^\s*(?:\\text\{\s*)?(?:the\s+)?empty set\W*$", re.I),
        r"\\emptyset ",
    ),
    (re.compile(r"\{,\}"), ","),
    (
        re.compile(r"[\[(]\s*\\begin\{array\}\{[^{}]*\}(.*?)\\end\{array\}\s*[\])]"),
        r"\\begin{pmatrix}\1\\end{pmatrix}",
    ),
    (re.compile(r"\^\s*\{?\s*\\?(?:circ|degree)(?![a-z])\s*\}?|\\degree(?![a-z])"), "°"),
    (re.compile(r"\\%|\\text\{\s*(?:percent|%|\\%)\s*\}|(?<=\d)\s*percent(?:age)?\b"), "%"),
    (re.compile(r"(?<=[\d}])\\text"), r" \\text"),
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
        text = pattern.sub(new, text)
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
    depth = deepest = 0
    for sign in text:
        depth += _DEPTH.get(sign, 0)
        deepest = max(deepest, depth)
    return deepest
