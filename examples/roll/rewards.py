"""Rewards of ROLL's domains crossthinkqa and ifeval (github.com/alibaba/ROLL, roll/pipeline/rlvr/rewards/ at commit
8eb27cc2), for reward=function: what tools/import_roll.py names."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from megarl.types import Prompt, Response

RIGHT = {"loose": (1.0, 1.0), "soft": (1.0, 0.5), "strict": (1.0, -1.0)}
"""The reward of a right option by ROLL's reward_type: in a box, and elsewhere"""
BOXED_WRONG = {"loose": -1.0, "soft": -0.5, "strict": -1.0}


def choice_loose(prompt: Prompt, response: Response) -> dict[str, Any]:
    return score_choice(prompt, response, "loose")


def choice_soft(prompt: Prompt, response: Response) -> dict[str, Any]:
    return score_choice(prompt, response, "soft")


def choice_strict(prompt: Prompt, response: Response) -> dict[str, Any]:
    return score_choice(prompt, response, "strict")


def score_choice(prompt: Prompt, response: Response, reward_type: str) -> dict[str, Any]:
    """crossthinkqa: whether the first capital letter of the last box, else behind the last "answer is", is the option
    that the answer begins with; less the price of repetition."""
    text = cut_thinking(response.text)
    boxes = re.findall(r"\\boxed\{([^}]+)\}", text)
    place = text.lower().rfind("answer is")
    stated = boxes[-1] if boxes else text[place + len("answer is") :] if place >= 0 else text
    option = next((character for character in stated if character.isupper()), None)
    correct = option is not None and option == prompt.answer[:1]
    reward = RIGHT[reward_type][not boxes] if correct else BOXED_WRONG[reward_type] if boxes else -1.0
    return {"score": reward + price_repetition(response.text), "correct": correct, "format": float(bool(boxes))}


def instruction(prompt: Prompt, response: Response) -> dict[str, Any]:
    """ifeval: whether the response keeps the constraint that the answer names, JSON with func_name and its arguments;
    less the price of repetition. Raises ValueError where it is none of CONSTRAINTS."""
    given = json.loads(prompt.answer)
    name = given.get("func_name")
    if name not in CONSTRAINTS:
        raise ValueError(f"func_name: found {name!r}; it must be one of {', '.join(CONSTRAINTS)}")
    correct = bool(CONSTRAINTS[name](cut_thinking(response.text), given))
    return {"score": float(correct) + price_repetition(response.text), "correct": correct}


def cut_thinking(text: str) -> str:
    """What stands behind the last </think>."""
    return text.rpartition("</think>")[2].lstrip("\n") if "</think>" in text else text


def price_repetition(text: str) -> float:
    """-0.5 times the share of three words in a row that stood before."""
    words = text.lower().split()
    triples = list(zip(words, words[1:], words[2:], strict=False))
    return -0.5 * (1 - len(set(triples)) / len(triples)) if triples else 0.0


def compare(found: int, given: Mapping[str, Any], around: float = 0) -> bool:
    """at least, at most or around N."""
    wanted = int(given["N"])
    kinds = {"at least": found >= wanted, "at most": found <= wanted, "around": abs(found - wanted) <= around}
    return kinds.get(given["quantifier"], False)


def count_paragraphs(text: str) -> int:
    """Those that `* * *` separates; 0 where one is empty."""
    parts = [part.strip() for part in text.split("* * *")]
    return len(parts) if all(parts) else 0


def begins_paragraph(text: str, given: Mapping[str, Any]) -> bool:
    parts = text.split("\n\n")
    return len(parts) == given["N"] and bool(parts[given["i"] - 1].strip().startswith(given["first_word"]))


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def is_language(text: str, given: Mapping[str, Any]) -> bool:
    from langdetect import detect  # `pip install langdetect`; no other constraint needs it

    return bool(detect(text) == given["language"])


def count_sections(text: str, splitter: str) -> int:
    return len(text.split(splitter)) - text.startswith(splitter)


def has_two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and parts[0] != parts[1]


_SENTENCE = re.compile(r"(?<!\w\.\w.)(?<![A-Z][a-z]\.)(?<=\.|\?)\s")
CONSTRAINTS: Mapping[str, Callable[[str, Mapping[str, Any]], bool]] = {
    "verify_keywords": lambda t, it: all(word.lower() in t.lower() for word in it["keyword_list"]),
    "verify_keyword_frequency": lambda t, it: re.findall(r"\b\w+\b", t.lower()).count(it["word"].lower()) == it["N"],
    "validate_forbidden_words": lambda t, it: not any(word.lower() in t.lower() for word in it["forbidden_words"]),
    "verify_letter_frequency": lambda t, it: t.count(it["letter"]) == it["N"],
    "validate_response_language": is_language,
    "verify_paragraph_count": lambda t, it: count_paragraphs(t) == it["N"],
    "validate_word_constraint": lambda t, it: compare(len(t.split()), it, max(round(it["N"] * 0.1), 1)),
    "verify_sentence_constraint": lambda t, it: compare(len(_SENTENCE.split(t)), it, 1),
    "validate_paragraphs": begins_paragraph,
    "verify_postscript": lambda t, it: bool(t.partition(it["postscript_marker"])[2].strip()),
    "validate_placeholders": lambda t, it: len(re.findall(r"\[(.*?)\]", t)) >= it["N"],
    "verify_bullet_points": lambda t, it: sum(x.strip().startswith(("*", "-")) for x in t.split("\n")) == it["N"],
    "validate_title": lambda t, it: re.search(r"<<(.*?)>>", t) is not None,
    "validate_choice": lambda t, it: any(t in option for option in it["options"]),
    "validate_highlighted_sections": lambda t, it: len(re.findall(r"\*(.*?)\*", t)) >= it["N"],
    "validate_sections": lambda t, it: count_sections(t, it["section_splitter"]) == it["N"],
    "validate_json_format": lambda t, it: is_json(t),
    "validate_repeat_prompt": lambda t, it: t.startswith(it["original_prompt"]),
    "validate_two_responses": lambda t, it: has_two_responses(t),
    "validate_uppercase": lambda t, it: t == t.upper(),
    "validate_lowercase": lambda t, it: t == t.lower(),
    "validate_frequency_capital_words": lambda t, it: compare(len(re.findall(r"\b[A-Z]+\b", t)), it),
    "validate_end": lambda t, it: t.endswith(it["end_phrase"]),
    "validate_quotation": lambda t, it: t.startswith('"') and t.endswith('"'),
    "validate_no_commas": lambda t, it: "," not in t,
}
"""By ROLL's func_name. Its verify_keyword_frequency counts every word; here it counts the keyword."""
