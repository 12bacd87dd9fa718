"""examples/roll: rewards of ROLL's domains, and its tests of code."""

import json
from typing import Any

import pytest

from megarl.examples.roll.rewards import CONSTRAINTS, choice_loose, choice_soft, choice_strict, instruction
from megarl.task.reward import read_tests
from megarl.types import FinishReason, Prompt, Response


def score(function: Any, text: str, answer: str) -> Any:
    response = Response([1], text, [0.0], [True], [0], FinishReason.stop)
    return function(Prompt("0", "", (1,), answer), response)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I think so.</think> \\boxed{B}", (1.0, 1.0, 1.0)),
        ("The answer is B", (1.0, 0.5, -1.0)),
        ("It is \\boxed{C}, not B", (-1.0, -0.5, -1.0)),
        ("the answer is c", (-1.0, -1.0, -1.0)),
    ],
)
def test_an_option_is_scored_as_roll_does(text: str, expected: tuple[float, ...]) -> None:
    found = tuple(score(each, text, "B")["score"] for each in (choice_loose, choice_soft, choice_strict))
    assert found == expected


KEPT: dict[str, tuple[dict[str, Any], str, str]] = {
    "verify_keywords": ({"keyword_list": ["Sun"]}, "the sun", "the moon"),
    "verify_keyword_frequency": ({"word": "a", "N": 2}, "a cat, A dog", "a cat"),
    "validate_forbidden_words": ({"forbidden_words": ["x"]}, "abc", "abX"),
    "verify_letter_frequency": ({"letter": "a", "N": 2}, "banal", "bAnal"),
    "verify_paragraph_count": ({"N": 2}, "a * * * b", "a * * * "),
    "validate_word_constraint": ({"N": 3, "quantifier": "at most"}, "a b c", "a b c d"),
    "verify_sentence_constraint": ({"N": 2, "quantifier": "at least"}, "It is. It was.", "It is."),
    "validate_paragraphs": ({"N": 2, "first_word": "So", "i": 2}, "a\n\nSo b", "So\n\nb"),
    "verify_postscript": ({"postscript_marker": "P.S."}, "a P.S. b", "a P.S. "),
    "validate_placeholders": ({"N": 2}, "[a] [b]", "[a]"),
    "verify_bullet_points": ({"N": 2}, "* a\n- b", "* a"),
    "validate_title": ({}, "<<a>> b", "a b"),
    "validate_choice": ({"options": ["yes", "no"]}, "yes", "maybe"),
    "validate_highlighted_sections": ({"N": 1}, "*a*", "a"),
    "validate_sections": ({"N": 2, "section_splitter": "PART"}, "PART a PART b", "PART a"),
    "validate_json_format": ({}, "[1]", "[1"),
    "validate_repeat_prompt": ({"original_prompt": "Say a"}, "Say a: a", "a"),
    "validate_two_responses": ({}, "a ****** b", "a ****** a"),
    "validate_uppercase": ({}, "AB 1", "Ab"),
    "validate_lowercase": ({}, "ab 1", "Ab"),
    "validate_frequency_capital_words": ({"N": 1, "quantifier": "around"}, "AB c", "AB CD"),
    "validate_end": ({"end_phrase": "bye."}, "so, bye.", "bye. so"),
    "validate_quotation": ({}, '"a"', '"a'),
    "validate_no_commas": ({}, "a b", "a, b"),
}


def test_each_constraint_tells_a_text_that_keeps_it_from_one_that_does_not() -> None:
    assert KEPT.keys() | {"validate_response_language"} == CONSTRAINTS.keys()
    for name, (given, kept, broken) in KEPT.items():
        answer = json.dumps({"func_name": name, **given})
        assert [score(instruction, text, answer)["correct"] for text in (kept, broken)] == [True, False], name


def test_repetition_costs_up_to_a_half_and_an_unknown_constraint_is_named() -> None:
    answer = json.dumps({"func_name": "validate_no_commas"})
    assert score(instruction, "a b c a b c a b c", answer)["score"] == pytest.approx(1 - 0.5 * 4 / 7)
    with pytest.raises(ValueError, match="func_name: found 'no_such'; it must be one of verify_keywords"):
        score(instruction, "a", json.dumps({"func_name": "no_such"}))


def test_rolls_test_cases_are_pairs_and_statements() -> None:
    pairs = [{"stdin": "1 2", "expected_stdout": "3"}]
    code = "from solution import add\n\ndef test_sum():\n    assert add(1, 2) == 3"
    cases = [*pairs, {"assert_code": code}, {"assert_code": "assert add(0, 0) == 0"}]
    found = read_tests(Prompt("0", "", (1,), json.dumps(cases)))
    assert found == ([("1 2", "3")], [f"{code}\ntest_sum()", "assert add(0, 0) == 0"])
    with pytest.raises(ValueError, match="reward=code needs"):
        read_tests(Prompt("0", "", (1,), json.dumps([{"stdin": "1"}])))
