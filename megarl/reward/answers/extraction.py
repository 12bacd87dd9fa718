"""Which parts of a response state its answer: boxes and explicit final statements, after the end of thinking.

Only the text is looked at here; megarl.reward.answers.reading says what a stated answer means. Every search is linear
in the length of the response.
"""

import re
from collections.abc import Iterator
from itertools import islice

from megarl.reward.answers.notation import WITHDRAWN

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
    boxes = [(start, content) for start, _, content in _find_boxes(text)]
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


def _find_boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """Start, end and content of each box that is closed and not taken back in its sentence."""
    position = 0
    while match := _BOX.search(text, position):
        end = _find_closing_brace(text, match.end())
        if end is None:
            return
        position = end
        before, after = text[max(0, match.start() - 40) : match.start()], text[end : end + 60]
        if not _TAKEN_BACK.match(after) and not _NEGATED.search(before) and not _SAID_WRONG.search(before):
            yield match.start(), end, text[match.end() : end - 1]


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
    """The statement at the start of the text, and what follows: a formula, or the line up to the sentence's end."""
    text = text.lstrip()
    for opening, closing in (("\\[", "\\]"), ("$$", "$$")):
        if text.startswith(opening):
            end = text.find(closing, len(opening))
            if end > 0:
                return text[len(opening) : end].strip(), text[end + len(closing) :][:60]
    line = text.split("\n", 1)[0]
    if sentence_end := _SENTENCE_END.search(line):
        line = line[: sentence_end.start()]
    line = _REASON.sub("", line).strip(" \t*_`")
    start = found.end() if (found := _SUBJECT.match(line)) else 0
    end = text.find(line) + len(line)
    return line[start:], text[end : end + 60]
