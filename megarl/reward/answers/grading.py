"""One verdict from a response and the expected answer (the gold)."""

import re
from dataclasses import dataclass

from megarl.reward.answers.equality import is_equal, write_answer
from megarl.reward.answers.extraction import (
    MAX_CHARACTERS,
    extract_statements,
    find_last_value,
    remove_thinking,
)
from megarl.reward.answers.notation import clean
from megarl.reward.answers.reading import Answer, Expression, Items, read_answer

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
    """Whether the response states the expected answer, once or several times, and no other one.

    mode: reward.answer. thinking: the prompt ends with an open thinking tag.
    """
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
        return _grade_texts(choice.group(1), [_read_choice(each) for each in statements])
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
    is_one = len(found) == 1
    answer = found.pop() if is_one else None
    return Verdict(answer is not None and answer == gold, is_one, answer)


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


def _read_choice(text: str) -> str:
    found = _CHOICE.match(strip_text(text))
    return (found.group(1) or found.group(2)).upper() if found else ""


def _fold(text: str) -> str:
    """Words without case, spaces, quotes and a full stop at the end."""
    return re.sub(r"\s+|[\"'`]|\\[,; ]|[{}$]", "", strip_text(text)).casefold().rstrip(".!")
