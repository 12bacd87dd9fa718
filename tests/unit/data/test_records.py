import json
import re
from typing import Any

import pytest

from megarl.config.errors import ConfigError
from megarl.config.schema.data import FileDataConfig
from megarl.data.problem import Message
from megarl.data.records import read_answer, read_problems


def read_all(*records: dict[str, Any], **keys: str) -> list[tuple[str, str]]:
    located = [(f"f:{number}", record) for number, record in enumerate(records, start=1)]
    return [(p.messages[-1].content, p.answer) for p in read_problems(located, FileDataConfig(**keys))]


@pytest.mark.parametrize(
    "record",
    [
        {"question": "Q", "answer": "A"},
        {"problem": "Q", "solution": r"so \boxed{A}"},
        {"problem": "Q", "solution": "long text", "answer": "A"},
        {"prompt": "Q", "label": "A"},
        {"input": "Q", "target": "A"},
        {"input": "Q", "output": "A"},
        {"instruction": "Q", "output": "A"},
        {"instruction": "Q", "input": "", "output": "A"},
        {"query": "Q", "response": "A"},
        {"question": "Q", "problem": "P", "expected_answer": "A"},
        {"question": None, "problem": "Q", "ground_truth": ["A"]},
        {
            "prompt": [{"role": "user", "content": "Q"}],
            "reward_model": {"ground_truth": "A", "style": "rule"},
        },
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
        {"messages": [{"role": "user", "content": "Q"}], "answer": "A"},
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
    ],
)
def test_the_usual_field_names_are_found(record: dict[str, Any]) -> None:
    assert read_all(record) == [("Q", "A")]


def test_a_chat_that_is_written_as_json_within_a_text_is_read_as_a_chat() -> None:
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "1+1?"}]
    record = {"messages": json.dumps(chat), "ground_truth": "2"}
    (problem,) = read_problems([("f:1", record)], FileDataConfig(prompt_field="messages"))
    assert problem.messages == (Message("system", "S"), Message("user", "1+1?"))
    assert problem.answer == "2"


@pytest.mark.parametrize("text", ["[1, 2] + [3]?", "[[1, 2], [3, 4]]", "[]", '[{"a": 1}]', "[" * 100_000])
def test_a_question_that_only_looks_like_json_stays_a_question(text: str) -> None:
    assert read_all({"question": text, "answer": "A"}) == [(text, "A")]


def test_an_instruction_with_an_input_is_asked_with_it() -> None:
    assert read_all({"instruction": "Add.", "input": "1 2", "output": "3"}) == [("Add.\n\n1 2", "3")]


def test_named_fields_win_over_found_ones_and_may_be_nested() -> None:
    record = {"question": "no", "answer": "no", "task": {"text": "Q"}, "gold.value": "A"}
    assert read_all(record, prompt_field="task.text", answer_field="gold.value") == [("Q", "A")]


def test_the_answer_at_the_end_of_a_chat_is_not_shown_to_the_model() -> None:
    chat = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "secret"},
    ]
    (problem,) = read_problems([("f:1", {"messages": chat, "answer": "A"})], FileDataConfig())
    assert problem.messages == (Message("system", "S"), Message("user", "Q"))
    assert problem.answer == "A"


def test_other_fields_become_metadata_as_text() -> None:
    record = {"question": "Q", "answer": "A", "level": 3, "tags": ["x"], "subject": "algebra"}
    (problem,) = read_problems([("f:1", record)], FileDataConfig())
    assert problem.metadata == {"level": "3", "tags": '["x"]', "subject": "algebra", "location": "f:1"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("6 * 3 = <<6*3=18>>18\n#### 18", "18"),
        ("#### 1,234,567", "1234567"),
        ("#### 1,2", "1,2"),
        ("first #### 3 is no line of its own", "first #### 3 is no line of its own"),
        (27.0, "27"),
        (0.5, "0.5"),
        (-3, "-3"),
        (" 42 ", "42"),
        (r"\boxed{1} and \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1", r"\boxed{1"),
        ([7], "7"),
        (float("nan"), ""),
        (["a", "b"], ""),
        (None, ""),
    ],
)
def test_an_answer_is_cleaned_to_the_final_one(value: Any, expected: str) -> None:
    assert read_answer(value) == expected


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"text": "x"}, "f:2: question: found only text; expected a text"),
        ({"question": " ", "answer": "A"}, "f:2: question: found ' '; expected"),
        ({"question": 3, "answer": "A"}, "f:2: question: found 3; expected"),
        ({"question": "Q", "answer": ""}, "f:2: answer: found ''; expected"),
        ({"question": "Q", "solution": "A"}, "f:2: answer: found only question, solution; expected"),
        ({"question": [], "answer": "A"}, "f:2: question: found no messages"),
        ({"question": [{"role": "judge", "content": "x"}], "answer": "A"}, "f:2: question[0]: found {'role'"),
        ({"question": ["x"], "answer": "A"}, "f:2: question[0]: found 'x'"),
        (
            {"question": [{"role": "assistant", "content": "x"}], "answer": "A"},
            "f:2: question: found no user",
        ),
    ],
)
def test_a_bad_record_is_located_with_what_was_found_and_expected(record: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        read_all({"question": "Q", "answer": "A"}, record)


@pytest.mark.parametrize(
    ("record", "key"),
    [
        ({"text": "x"}, "data.prompt_field"),
        ({"question": "x"}, "data.answer_field"),
        ({}, "data.prompt_field"),
    ],
)
def test_unknown_field_names_end_with_the_key_that_names_them(record: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^f:1: .* or set {key}$"):
        read_all(record)


def test_a_chat_without_its_answer_is_located() -> None:
    turn = {"role": "user", "content": "Q"}
    with pytest.raises(ConfigError, match="f:2: messages: the last message is of user"):
        read_all({"messages": [turn, {"role": "assistant", "content": "A"}]}, {"messages": [turn]})
