import json
import re
from typing import Any

import pytest

from megarl.config.errors import ConfigError
from megarl.config.schema.task import AnswerPart, FileDataConfig
from megarl.task.problems import Message, read_answer, read_problems


def read_all(*records: dict[str, Any], **keys: Any) -> list[tuple[str, str]]:
    located = [(f"f:{number}", record) for number, record in enumerate(records, start=1)]
    return [(p.messages[-1].content, p.answer) for p in read_problems(located, FileDataConfig(**keys))[0]]


@pytest.mark.parametrize(
    "record",
    [
        {"question": "Q", "answer": "A"},
        {"problem": "Q", "solution": "long text", "answer": "A"},
        {"prompt": "Q", "label": "A"},
        {"input": "Q", "target": "A"},
        {"input": "Q", "output": "A"},
        {"instruction": "Q", "output": "A"},
        {"instruction": "Q", "input": "", "output": "A"},
        {"query": "Q", "response": "A"},
        {"question": "Q", "problem": "P", "expected_answer": "A"},
        {"question": None, "problem": "Q", "ground_truth": ["A"]},
        {"prompt": [{"role": "user", "content": "Q"}], "reward_model": {"ground_truth": "A", "style": "rule"}},
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
        {"messages": [{"role": "user", "content": "Q"}], "answer": "A"},
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "it is A"}], "answer": "A"},
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
    ],
)
def test_the_usual_field_names_are_found(record: dict[str, Any]) -> None:
    assert read_all(record) == [("Q", "A")]


def test_a_chat_that_is_written_as_json_within_a_text_is_read_as_a_chat() -> None:
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "1+1?"}]
    record = {"messages": json.dumps(chat), "ground_truth": "2"}
    ((problem,), _) = read_problems([("f:1", record)], FileDataConfig(prompt_field="messages"))
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


def test_other_fields_become_metadata_as_text() -> None:
    record = {"question": "Q", "answer": "A", "level": 3, "tags": ["x"], "subject": "algebra"}
    ((problem,), _) = read_problems([("f:1", record)], FileDataConfig())
    assert problem.metadata == {"level": "3", "tags": '["x"]', "subject": "algebra", "location": "f:1"}


@pytest.mark.parametrize(
    ("value", "part", "expected"),
    [
        ("6 * 3 = <<6*3=18>>18\n#### 18", "after_hashes", "18"),
        ("#### 1,234,567", "after_hashes", "1234567"),
        ("#### 1,2", "after_hashes", "1,2"),
        ("first #### 3 is no line of its own", "after_hashes", ""),
        (r"\boxed{1} and \boxed{\frac{1}{2}}.", "boxed", r"\frac{1}{2}"),
        (r"\boxed{1", "boxed", ""),
        ("so it is\n#### 18", "whole", "so it is\n#### 18"),
        (r"the formula \boxed{x} is wrong", "whole", r"the formula \boxed{x} is wrong"),
        (27.0, "boxed", "27"),
        (0.5, "whole", "0.5"),
        (-3, "whole", "-3"),
        (" 42 ", "whole", "42"),
        ([7], "whole", "7"),
        (float("nan"), "whole", ""),
        (["a", "b"], "whole", ""),
        (None, "whole", ""),
    ],
)
def test_of_an_answer_the_part_is_taken_that_the_key_names(value: Any, part: str, expected: str) -> None:
    assert read_answer(value, AnswerPart(part)) == expected


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["a\n#### 1", "b\n#### 1,000 "], ["1", "1000"]),
        (["#### Summary\na\n#### Details\nb"], ["#### Summary\na\n#### Details\nb"]),
        (["a\n#### Details"], ["a\n#### Details"]),
        ([r"the \boxed{x} is wrong: 7", "8", "9"], [r"the \boxed{x} is wrong: 7", "8", "9"]),
    ],
)
def test_answers_are_taken_whole_unless_every_one_ends_with_a_line_of_hashes_and_a_number(
    answers: list[str], expected: list[str]
) -> None:
    assert [answer for _, answer in read_all(*({"question": "Q", "answer": answer} for answer in answers))] == expected


@pytest.mark.parametrize("answers", [["a\n#### 1", "7"], [r"it is \boxed{1}"]])
def test_answers_of_which_a_part_may_be_meant_are_refused_with_the_key_that_says_it(answers: list[str]) -> None:
    records = [{"question": "Q", "answer": answer} for answer in answers]
    with pytest.raises(
        ConfigError, match=r"^data\.answer_part: found null; 1 of \d answers, as that of f:1, have what"
    ):
        read_all(*records)
    assert [answer for _, answer in read_all(*records, answer_part=AnswerPart.whole)] == answers


def test_the_columns_are_chosen_by_all_records_and_said_with_those_that_were_not() -> None:
    full = {"question": "Q", "answer": "A", "solution": "words about A"}
    with pytest.raises(
        ConfigError, match=r"^f:1: answer: found null; .* or name another column with data\.answer_field"
    ):
        read_all({**full, "answer": None}, full)
    located = [("f:1", full), ("f:2", {**full, "solution": None})]
    _, note = read_problems(located, FileDataConfig())
    assert note == "questions from column question, answers from column answer (not from solution)"


@pytest.mark.parametrize("other", ["label", "target", "answer"])
def test_verls_column_of_the_truth_goes_before_every_other(other: str) -> None:
    assert read_all({"prompt": "Q", other: "easy", "reward_model": {"ground_truth": "A"}}) == [("Q", "A")]


@pytest.mark.parametrize("column", [{"images": ["a.png"]}, {"image_1": "a.png"}, {"video": {"path": "a.mp4"}}])
def test_a_column_of_pictures_or_sounds_is_refused_by_its_name(column: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^f:1: {next(iter(column))}: found .* reads text alone"):
        read_all({"question": "Q", "answer": "A", **column})
    assert read_all({"question": "Q", "answer": "A", "images": [], "image": None}) == [("Q", "A")]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"text": "x"}, "f:2: question: found only text; expected a text"),
        ({"question": [{"role": "user", "content": "Q", "tool_calls": [{}]}], "answer": "A"}, "without tool_calls"),
        ({"question": " ", "answer": "A"}, "f:2: question: found ' '; expected"),
        ({"question": 3, "answer": "A"}, "f:2: question: found 3; expected"),
        ({"question": "Q", "answer": ""}, "f:2: answer: found ''; expected"),
        ({"question": "Q", "solution": "A"}, "f:2: answer: found only question, solution; expected"),
        ({"question": [], "answer": "A"}, "f:2: question: found no messages"),
        ({"question": [{"role": "judge", "content": "x"}], "answer": "A"}, "f:2: question[0]: found {'role'"),
        ({"question": ["x"], "answer": "A"}, "f:2: question[0]: found 'x'"),
        ({"question": [{"role": "assistant", "content": "x"}], "answer": "A"}, "f:2: question: found no user"),
    ],
)
def test_a_bad_record_is_located_with_what_was_found_and_expected(record: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        read_all({"question": "Q", "answer": "A"}, record)


@pytest.mark.parametrize(
    ("record", "key"),
    [({"text": "x"}, "data.prompt_field"), ({"question": "x"}, "data.answer_field"), ({}, "data.prompt_field")],
)
def test_unknown_field_names_end_with_the_key_that_names_them(record: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^f:1: .* or set {key}$"):
        read_all(record)
