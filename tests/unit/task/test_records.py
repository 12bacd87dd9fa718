import json
import re
from typing import Any

import pytest

from megarl.config.errors import ConfigError
from megarl.config.schema.task import AnswerPart, FileDataConfig
from megarl.task.data import read_problems

CHAT = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
ANSWERED = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]

OF_VERL = {"reward_model": {"ground_truth": "A"}}
NAMED = {"prompt_field": "task.text", "answer_field": "gold.value"}


def read_all(*records: dict[str, Any], **keys: Any) -> list[tuple[str, str]]:
    located = [(f"f:{number}", record) for number, record in enumerate(records, start=1)]
    return [(p.messages[-1].content, p.answer) for p in read_problems(located, FileDataConfig(**keys))[0]]


@pytest.mark.parametrize(
    ("record", "keys", "question"),
    [
        *[(record, {}, "Q") for record in (
            *({"problem": "Q", "solution": "long text", "answer": "A"}, {"prompt": "Q", "label": "A"}),
            *({"input": "Q", "target": "A"}, {"input": "Q", "output": "A"}, {"query": "Q", "response": "A"}),
            {"instruction": "Q", "input": "", "output": "A"},
            {"question": "Q", "problem": "P", "expected_answer": "A"},
            {"question": None, "problem": "Q", "ground_truth": ["A"]},
            # verl's column of the truth goes before every other.
            {"prompt": CHAT, "reward_model": {"ground_truth": "A", "style": "rule"}},
            *[{"prompt": "Q", other: "easy", **OF_VERL} for other in ("label", "target", "answer")],
            {"messages": ANSWERED},
            {"messages": CHAT, "answer": "A"},
            {"messages": json.dumps(CHAT), "ground_truth": "A"},
            {"messages": [*CHAT, {"role": "assistant", "content": "it is A"}], "answer": "A"},
            {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
            {"question": "Q", "answer": "A", "images": [], "image": None},
        )],
        # An instruction is asked with its input, and named fields win over found ones.
        ({"instruction": "Add.", "input": "1 2", "output": "A"}, {}, "Add.\n\n1 2"),
        ({"question": "no", "answer": "no", "task": {"text": "Q"}, "gold.value": "A"}, NAMED, "Q"),
        # What only looks like JSON stays a question.
        *[({"question": text, "answer": "A"}, {}, text)
          for text in ("[1, 2] + [3]?", "[[1, 2], [3, 4]]", "[]", '[{"a": 1}]', "[" * 100_000)],
    ],
)  # fmt: skip
def test_the_question_and_the_answer_are_found(record: dict[str, Any], keys: dict[str, str], question: str) -> None:
    assert read_all(record, **keys) == [(question, "A")]


def test_other_fields_become_metadata_as_text_and_a_note_says_which_were_read() -> None:
    record = {"question": "Q", "answer": "A", "level": 3, "tags": ["x"], "solution": "words about A"}
    ((problem, _), note) = read_problems([("f:1", record), ("f:2", {**record, "solution": None})], FileDataConfig())
    assert problem.metadata == {"level": "3", "tags": '["x"]', "solution": "words about A", "location": "f:1"}
    assert note == "questions from column question, answers from column answer (not from solution)"


@pytest.mark.parametrize(
    ("answers", "part", "expected"),
    [
        (["6 * 3 = <<6*3=18>>18\n#### 18"], "after_hashes", ["18"]),
        (["#### 1,234,567"], "after_hashes", ["1234567"]),
        (["#### 1,2"], "after_hashes", ["1,2"]),
        ([r"\boxed{1} and \boxed{\frac{1}{2}}."], "boxed", [r"\frac{1}{2}"]),
        (["so it is\n#### 18"], "whole", ["so it is\n#### 18"]),
        ([r"the formula \boxed{x} is wrong"], "whole", [r"the formula \boxed{x} is wrong"]),
        ([27.0], "boxed", ["27"]),
        ([0.5, -3, " 42 ", [7]], "whole", ["0.5", "-3", "42", "7"]),
        # Taken whole unless every one ends with a line of hashes and a number.
        (["a\n#### 1", "b\n#### 1,000 "], None, ["1", "1000"]),
        (["#### Summary\na\n#### Details\nb"], None, ["#### Summary\na\n#### Details\nb"]),
        (["a\n#### Details"], None, ["a\n#### Details"]),
        ([r"the \boxed{x} is wrong: 7", "8", "9"], None, [r"the \boxed{x} is wrong: 7", "8", "9"]),
    ],
)
def test_of_an_answer_the_part_is_taken_that_the_key_names(
    answers: list[Any], part: str | None, expected: list[str]
) -> None:
    records = [{"question": "Q", "answer": answer} for answer in answers]
    found = read_all(*records, answer_part=part and AnswerPart(part))
    assert [answer for _, answer in found] == expected


IN_DOUBT = "data.answer_part: found null; 1 of "
HASHED, BOXED = {"answer_part": AnswerPart.after_hashes}, {"answer_part": AnswerPart.boxed}


@pytest.mark.parametrize(
    ("record", "keys", "expected"),
    [
        ({"text": "x"}, {}, "f:2: question: found only text; expected a text"),
        ({"question": [{"role": "user", "content": "Q", "tool_calls": [{}]}], "answer": "A"}, {}, "without tool_calls"),
        ({"question": " ", "answer": "A"}, {}, "f:2: question: found ' '; expected"),
        ({"question": 3, "answer": "A"}, {}, "f:2: question: found 3; expected"),
        ({"question": "Q", "answer": None}, {}, "f:2: answer: found null; expected a text or number that is not bl"),
        *[({"question": "Q", "answer": it}, {}, "f:2: answer: found ") for it in (float("nan"), ["a", "b"])],
        ({"question": "Q", "answer": "first #### 3 is no line of its own"}, HASHED, "expected a text with what stands"),
        ({"question": "Q", "answer": r"\boxed{1"}, BOXED, "expected a text with what stands in the last"),
        ({"question": "Q", "solution": "A"}, {}, "f:2: answer: found only question, solution; expected"),
        ({"question": [], "answer": "A"}, {}, "f:2: question: found no messages"),
        ({"question": [{"role": "judge", "content": "x"}], "answer": "A"}, {}, "f:2: question[0]: found {'role'"),
        ({"question": ["x"], "answer": "A"}, {}, "f:2: question[0]: found 'x'"),
        ({"question": [{"role": "assistant", "content": "x"}], "answer": "A"}, {}, "f:2: question: found no user"),
        ({"question": "Q", "answer": "a\n#### 1"}, {}, f"{IN_DOUBT}2 answers, as that of f:2, have what"),
        ({"question": "Q", "answer": r"it is \boxed{1}"}, {}, f"{IN_DOUBT}2 answers, as that of f:2, have what"),
        *[
            ({"question": "Q", "answer": "A", **column}, {}, f"f:2: {next(iter(column))}: found ")
            for column in ({"images": ["a.png"]}, {"image_1": "a.png"}, {"video": {"path": "a.mp4"}})
        ],
    ],
)
def test_a_bad_record_is_located_with_what_was_found_and_expected(record, keys, expected: str) -> None:
    good = {"question": "Q", "answer": r"a \boxed{2}" "\n#### 2" if keys else "A"}
    with pytest.raises(ConfigError, match=re.escape(expected)):
        read_all(good, record, **keys)
    for first, key in (({"text": "x"}, "prompt_field"), ({"question": "x"}, "answer_field"), ({}, "prompt_field")):
        with pytest.raises(ConfigError, match=f"^f:1: .* or set data.{key}$"):
            read_all(first)
