"""Mathematical answers as text: which parts of a response state one, and one way of writing it.

Only the text is looked at here; megarl.task.math_grading says what a stated answer means. Every search is linear in the
length of the response.
"""

import re
from collections.abc import Iterator
from itertools import accumulate, islice

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
_NUMBER = re.compile(r"(?<![\w.,/*+×÷^=-])[-−]?(?:[$€£]\s?)?(?:\d[\d,]*)?\.?\d+(?:/\d+)?(?:\s?%)?(?![\d*/+×÷^])")
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


def ends_in_open_thinking(prompt: str) -> bool:
    """Whether the prompt ends with a tag that opens the response's thinking."""
    return _OPEN_THINKING.search(prompt) is not None


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
    found += [(m.end(), m.group(0)) for m in _NUMBER.finditer(re.sub(r"=\s*", "= ", sentence))]
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
