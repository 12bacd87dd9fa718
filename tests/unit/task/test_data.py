"""The `data` group, problems from files and their records, whole sets to evaluate on, and the order of the prompts."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from data_cases import build_byte_tokenizer, jsonl_config, load_toy
from pyarrow import parquet

from megarl.config.errors import ConfigError
from megarl.config.load import list_options, load_config
from megarl.config.schema.task import (
    SCHEMAS,
    AnswerPart,
    FileDataConfig,
    HuggingFaceDataConfig,
    JsonlDataConfig,
    ParquetDataConfig,
)
from megarl.task.data import SOURCES, PromptSampler, build_data, build_evaluation_set, read_problems
from megarl.types import Prompt


def test_every_source_is_an_option_of_the_group_and_every_option_a_source() -> None:
    needed = {"verifiers": ["environment=verifiers", "environment.id=x"], "function": ["data.path=x.py:f"]}
    names = [name for name in list_options("data") if name != "mix"]  # it is made of the others
    found = {type(load_config([f"data={name}", "model=tiny", *needed.get(name, ())]).data) for name in names}
    assert found == set(SOURCES)
    assert {*names, "mix"} >= set(SCHEMAS["data"])


RECORDS = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(40)]


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n\n" for record in records))
    return path


def read(path: Path, records: list[dict[str, Any]] = RECORDS, **keys: Any) -> Any:
    return build_data(jsonl_config(write_jsonl(path / "a.jsonl", records), **keys), build_byte_tokenizer(), 1)


def test_a_file_is_split_into_disjoint_sides_that_hold_everything(tmp_path: Path) -> None:
    data = read(tmp_path, num_heldout=7)
    assert (len(data.train), len(data.heldout), data.num_dropped) == (33, 7, 0)
    assert sorted(p.text for p in (*data.train, *data.heldout)) == sorted(record["question"] for record in RECORDS)
    # Repeats of a question stay on one side, under ids of their own.
    repeated = [*RECORDS, *({**r, "question": r["question"].replace(" ", "  ")} for r in RECORDS), *RECORDS]
    data = read(tmp_path, repeated, num_heldout=20)
    train, heldout = ({" ".join(p.text.split()) for p in split} for split in (data.train, data.heldout))
    assert not train & heldout
    assert (len(data.train), len(data.heldout), len({p.id for p in data.train})) == (60, 20, 60)


def test_a_heldout_file_is_used_whole_and_its_questions_leave_training(tmp_path: Path) -> None:
    heldout = str(write_jsonl(tmp_path / "b", RECORDS[:5]))
    for num_heldout, sizes in ((None, (35, 5, 5, 5)), (2, (38, 2, 2, 2))):
        data = read(tmp_path, heldout_path=heldout, num_heldout=num_heldout)
        # Short enough, all of them: what is missing is a repeat.
        assert (len(data.train), len(data.heldout), data.num_dropped, data.num_repeated) == sizes
    with pytest.raises(ConfigError, match="every training question is held out"):
        read(tmp_path, heldout_path=str(tmp_path / "a.jsonl"))


def test_prompts_over_the_length_are_dropped_and_counted(tmp_path: Path) -> None:
    records = [*RECORDS, {"question": "x" * 30, "answer": "1"}]
    data = read(tmp_path, records, prompt_length=30)
    assert (data.num_dropped, data.num_repeated) == (1, 0)
    assert max(len(p.token_ids) for p in (*data.train, *data.heldout)) <= 30
    assert read(tmp_path, records, prompt_length=31).num_dropped == 0
    shortest = len("What is 0 + 0?") + 1
    with pytest.raises(ConfigError, match=f"data.prompt_length: found 3; .*shortest has {shortest} tokens"):
        read(tmp_path, records, prompt_length=3)


LINE = b'{"question": "Q", "answer": "A"}\n'


@pytest.mark.usefixtures("offline")
def test_what_cannot_be_read_names_its_key_or_its_line(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a", RECORDS)
    refused = [
        (jsonl_config(tmp_path / "none"), "data.path: .*none does not exist"),
        (jsonl_config(tmp_path), "data.path: .* is a directory"),
        (jsonl_config(""), "data.path: found nothing"),
        (jsonl_config(path, heldout_path=str(tmp_path / "no")), "data.heldout_path: .*no does not exist"),
        (HuggingFaceDataConfig(), "data.path: found nothing"),
        (HuggingFaceDataConfig(path="nobody/nothing"), "data.path: nobody/nothing: .*hub was not reached.*hf download"),
        (ParquetDataConfig(path=str(path)), "expected a parquet file"),
    ]
    for number, (content, expected) in enumerate([
        (LINE + b'\n{"question": \n', r"jsonl:3: found .*one JSON object a line"),
        (LINE + b"[1]\n", r"jsonl:2: found a JSON list"),
        (b'{"question": "Q", "answer": "\xff"}\n', r"jsonl:1: found bytes that are not UTF-8"),
        (b"PAR1\x00\x01", r"jsonl:1: found 'PAR1"),
        (b"", "holds no problems"),
        (b"\xef\xbb\xbf" + LINE, "data.num_heldout: 1 of 1 different questions to split"),
    ]):  # fmt: skip
        (tmp_path / f"{number}.jsonl").write_bytes(content)
        refused.append((jsonl_config(tmp_path / f"{number}.jsonl"), expected))
    for config, expected in refused:
        with pytest.raises(ConfigError, match=expected):
            build_data(config, build_byte_tokenizer(), 1)
    # A set to evaluate on is read whole, and named with its own key.
    (tmp_path / "notes.txt").write_text("")
    for config, file, expected in (
        (JsonlDataConfig(prompt_length=10), "a.jsonl", r"data\.prompt_length: found 10; the longest prompt of data=s"),
        (HuggingFaceDataConfig(), "gone.jsonl", r"evaluate\.paths\.s: .*gone\.jsonl does not exist"),
        (HuggingFaceDataConfig(), "notes.txt", r"evaluate\.paths\.s: .*notes\.txt; it must be a \.jsonl or \.parquet"),
        (load_toy("addition"), "notes.txt", r"evaluate\.paths\.s: .*this set is generated"),
    ):
        write_jsonl(tmp_path / "a.jsonl", RECORDS)
        with pytest.raises(ConfigError, match=expected):
            build_set(config, tmp_path / file)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hub is not asked, and nothing is left in the user's cache."""
    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("offline")
def test_a_dataset_directory_of_either_kind_is_read(tmp_path: Path) -> None:
    import datasets

    whole = datasets.Dataset.from_list(RECORDS)
    whole.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=whole, test=datasets.Dataset.from_list(RECORDS[:3])).save_to_disk(tmp_path / "two")
    (tmp_path / "files").mkdir()
    write_jsonl(tmp_path / "files" / "train.jsonl", RECORDS)
    for name, split, num_heldout in (("one", None, 4), ("two", None, 4), ("files", None, 4), ("two", "test", 3)):
        config = HuggingFaceDataConfig(path=str(tmp_path / name), heldout_split=split)
        assert len(build_data(config, build_byte_tokenizer(), 1).heldout) == num_heldout, name
    config.heldout_split = "validation"
    with pytest.raises(ConfigError, match=r"data.heldout_split: found 'validation'; .* has train, test"):
        build_data(config, build_byte_tokenizer(), 1)


OF_SETS = {
    "gsm8k": {"question": "How many eggs?", "answer": "16 - 7 = <<16-7=9>>9 eggs.\n#### 1,009"},
    "aime24": {"id": 60, "problem": "Find $m+n$.", "solution": "It is $\\framebox{33}$.", "answer": "033", "url": "u"},
    "amc23": {"id": 0, "problem": "What is $x+y$?", "answer": 36.0, "url": "u", "question": "What is $x+y$?"},
}
ANSWERS = {"gsm8k": "1009", "aime24": "033", "amc23": "36"}


def build_set(config, path=None, seed=1, **keys):
    """The prompts of the set."""
    keys = {"name": "s", "path": path and str(path), **keys}
    return list(build_evaluation_set(config, build_byte_tokenizer(), seed, notes=[], **keys))


@pytest.mark.parametrize("name", sorted(OF_SETS))
def test_the_presets_read_files_of_the_sets_own_format_of_any_kind(tmp_path, name):
    import datasets

    config, records = load_config([f"data={name}", "reward=math"], "evaluate").data, [OF_SETS[name]]
    write_jsonl(tmp_path / "test.jsonl", records)
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "test.parquet")
    datasets.DatasetDict({config.heldout_split or config.split: datasets.Dataset.from_list(records)}).save_to_disk(
        str(tmp_path / "saved")
    )
    for file in ("test.jsonl", "test.parquet", "saved"):
        (prompt,) = build_set(config, tmp_path / file)
        assert prompt.answer == ANSWERS[name]
        question = OF_SETS[name].get("question") or OF_SETS[name]["problem"]
        asked = f"{question}\n\nReason step by step, and put your final answer within \\boxed{{}}."
        assert prompt.text.endswith(asked)


def test_every_problem_is_taken_in_order_and_fewer_are_drawn_alike_for_the_same_seed(tmp_path):
    path = write_jsonl(tmp_path / "test.jsonl", RECORDS)
    # The held-out part is the set where there is one.
    for config in (
        JsonlDataConfig(path=path),
        JsonlDataConfig(path=str(tmp_path / "no_training_part.jsonl"), heldout_path=path),
    ):
        draws = [
            [int(prompt.answer) for prompt in build_set(config, seed=seed, num_problems=num_problems)]
            for seed, num_problems in ((1, None), (2, 99), (1, 10), (1, 10), (2, 10))
        ]
        assert draws[0] == draws[1] == list(range(0, 80, 2))
        assert draws[2] == draws[3] == sorted({*draws[2]}) != draws[4]
        assert len(draws[2]) == 10
    assert len(build_set(load_toy("addition", 7))) == 7


def make_prompts(n: int, name: str = "p") -> list[Prompt]:
    return [Prompt(f"{name}{i}", "text", (1,), "answer") for i in range(n)]


def test_an_epoch_holds_every_prompt_once_though_batches_span_epochs() -> None:
    sampler = PromptSampler(make_prompts(10), seed=3)
    drawn = [prompt.id for _ in range(10) for prompt in sampler.next_batch(7)]
    epochs = [drawn[start : start + 10] for start in range(0, 70, 10)]
    assert all(sorted(epoch) == sorted(p.id for p in make_prompts(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 7


@pytest.mark.parametrize("num_batches", [0, 1, 5, 13])
def test_a_restored_sampler_goes_on_as_the_first_would_and_a_state_of_other_data_is_refused(num_batches: int) -> None:
    first, second, other = (PromptSampler(make_prompts(20), seed=seed) for seed in (5, 5, 6))
    for _ in range(num_batches):
        first.next_batch(4)
    second.next_batch(3)
    second.restore(json.loads(json.dumps(first.state())))
    batches = [[sampler.next_batch(6) for _ in range(10)] for sampler in (first, second, other)]
    assert batches[0] == batches[1] != batches[2]
    for change in ({"seed": 8}, {"prompts": "other"}):
        with pytest.raises(ValueError, match=next(iter(change))):
            first.restore(first.state() | change)


def test_prompts_that_are_to_be_skipped_are_passed_over_for_so_many_epochs_also_in_a_restored_sampler() -> None:
    def draw_epoch(sampler: PromptSampler[Prompt], num: int) -> set[str]:
        return {prompt.id for prompt in sampler.next_batch(num)}

    first, second = (PromptSampler(make_prompts(5), seed=5) for _ in range(2))
    everything, prompts = draw_epoch(first, 5), make_prompts(5)
    assert first.skip([prompts[1], prompts[3]], 2) == 0
    assert draw_epoch(first, 3) == everything - {"p1", "p3"}
    assert first.skip(prompts[:1], 1) == 2
    second.restore(json.loads(json.dumps(first.state())))
    # p0 was noted in the epoch before this one.
    for sampler in (first, second):
        assert draw_epoch(sampler, 2) == everything - {"p0", "p1", "p3"}
        assert draw_epoch(sampler, 5) == everything
        assert sampler.skip([], 1) == 3
    assert first.state() == second.state()
    # Where no other prompt is left, the next epoch that has some is the next one.
    first.skip(prompts, 3)
    assert draw_epoch(first, 5) == everything


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


CALLED = {"function": {"name": "f", "arguments": "{}"}}
IN_DOUBT = "data.answer_part: found null; 1 of "
HASHED, BOXED = {"answer_part": AnswerPart.after_hashes}, {"answer_part": AnswerPart.boxed}


@pytest.mark.parametrize(
    ("record", "keys", "expected"),
    [
        ({"text": "x"}, {}, "f:2: question: found only text; expected a text"),
        *[
            ({"question": [{"content": "Q", **wrong}], "answer": "A"}, {}, f"f:2: question[0]: {found}")
            for wrong, found in (
                ({"role": "user", "tool_calls": [CALLED]}, "found {'content': 'Q', 'role': 'user', 'tool_calls'"),
                (
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x"}}]},
                    "found {'content'",
                ),
                ({"role": "user", "image": "a.png"}, "image: found 'a.png'; the model reads text alone"),
                (
                    {"role": "user", "content": [{"type": "image_url", "image_url": "u"}]},
                    "found a part of type image_url, ",
                ),
            )
        ],
        ({"question": " ", "answer": "A"}, {}, "f:2: question: found ' '; expected"),
        ({"question": 3, "answer": "A"}, {}, "f:2: question: found 3; expected"),
        ({"question": "Q", "answer": None}, {}, "f:2: answer: found null; expected a text or number that is not bl"),
        *[({"question": "Q", "answer": it}, {}, "f:2: answer: found ") for it in (float("nan"), ["a", ""], [["a"]])],
        ({"question": "Q", "answer": {"value": "a"}}, {}, "data.answer_field=answer.value names a field of it"),
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
            for column in (
                *({"images": ["a.png"]}, {"image_1": "a.png"}, {"video": {"path": "a.mp4"}}),
                {"scan": {"bytes": b"PNG", "path": None}},
            )
        ],
    ],
)
def test_a_bad_record_is_located_with_what_was_found_and_expected(record, keys, expected: str) -> None:
    good = {"question": "Q", "answer": r"a \boxed{2}" "\n#### 2" if keys else "A"}
    with pytest.raises(ConfigError, match=re.escape(expected)):
        read_all(good, record, **keys)
    for first in ({"text": "x"}, {}):
        with pytest.raises(ConfigError, match=r"^f:1: .* or set data.prompt_field$"):
            read_all(first)


def chat(*contents: str, **first: Any) -> list[dict[str, Any]]:
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": text, **first} for role, text in zip(roles, contents, strict=False)]


LONG = "\n\nHuman: One?\n\nAssistant: 1\n\nHuman: Why?\n\nAssistant: So."
SHAREGPT = [
    {"from": "human", "value": "One?"},
    {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
    {"from": "observation", "value": "7"},
    {"from": "gpt", "value": "1"},
]
OF_OPENAI = [
    {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
    {"role": "user", "content": "One?", "name": None, "tool_calls": None},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
    {"role": "tool", "content": "7", "tool_call_id": "c1"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("record", "keys", "said", "answers"),
    [
        # verl's parquet, and DAPO-Math-17k, which has its form.
        ({"data_source": "math_dapo", "prompt": chat("One?"), "ability": "MATH",
          "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": "9"}},
         {}, ["user: One?"], ["34"]),
        # Search-R1's
        ({"prompt": chat("Who?"), "reward_model": {"ground_truth": {"target": ["Ann", "A. B.", "Ann"]}}},
         {"answer_field": "reward_model.ground_truth.target"}, ["user: Who?"], ["Ann", "A. B."]),
        # DeepScaleR, OpenR1-Math
        ({"problem": "One?", "answer": "1", "solution": "words"}, {}, ["user: One?"], ["1"]),
        ({"problem": "One?", "solution": "words", "answer": "1", "generations": ["a", "b"], "correctness_llama": None,
          "messages": chat("One?", "words")}, {}, ["user: One?"], ["1"]),
        # TRL's forms
        *[(record, {}, ["user: One?"], answers) for record, answers in (
            ({"prompt": "One?", "completion": "1"}, ["1"]),
            ({"prompt": chat("One?"), "completion": chat("", "1")[1:]}, ["1"]),
            ({"prompt": chat("One?")}, []),
            ({"prompt": "One?"}, []),
            ({"messages": chat("One?", "1")}, ["1"]),
        )],
        # Preferences: UltraFeedback; Skywork and HelpSteer without a prompt; Anthropic-HH
        ({"prompt": "One?", "chosen": chat("One?", "1"), "rejected": chat("One?", "2"), "score_chosen": 8.0},
         {"answer_field": "chosen"}, ["user: One?"], ["1"]),
        ({"chosen": chat("One?", "1", "Why?", "So."), "rejected": chat("One?", "1", "Why?", "No.")},
         {}, ["user: One?", "assistant: 1", "user: Why?"], ["So."]),
        ({"chosen": LONG, "rejected": "x"}, {}, ["user: One?", "assistant: 1", "user: Why?"], ["So."]),
        # A prompt alone in Anthropic's form stays a text.
        ({"prompt": LONG.removesuffix(" So.")}, {}, [f"user: {LONG.removesuffix(' So.')}"], []),
        # ShareGPT with calls and a system text of its own; OpenAI's messages
        ({"conversations": SHAREGPT, "system": "Be brief."}, {},
         ["system: Be brief.", "user: One?", "assistant: [f x=1]", "tool: 7"], ["1"]),
        ({"messages": OF_OPENAI, "answer": "7"}, {},
         ["system: Be brief.", "user: One?", "assistant: [f x=1]", "tool: 7"], ["7"]),
        # Columns within columns, lists and texts of JSON
        ({"extra": '{"tasks": [{"q": "One?"}]}', "gold": {"all": ["1", 1.0, 2]}},
         {"prompt_field": "extra.tasks.0.q", "answer_field": "gold.all"}, ["user: One?"], ["1", "2"]),
    ],
)  # fmt: skip
def test_records_of_the_hubs_sets_are_read_as_they_are(
    record: dict[str, Any], keys: dict[str, str], said: list[str], answers: list[str]
) -> None:
    ((problem,), _) = read_problems([("f:1", record)], FileDataConfig(**keys))
    calls = [[each["function"] for each in m.others.get("tool_calls", ())] for m in problem.messages]
    shown = [
        m.content or "".join(f"[{c['name']} {' '.join(f'{k}={v}' for k, v in c['arguments'].items())}]" for c in called)
        for m, called in zip(problem.messages, calls, strict=True)
    ]
    assert [f"{m.role}: {text}" for m, text in zip(problem.messages, shown, strict=True)] == said
    assert [problem.answer, *problem.references[1:]] == (answers or [""])


def test_the_calls_of_an_answer_are_its_text_and_other_calls_are_another_question() -> None:
    asked = [*chat("One?"), {"role": "assistant", "content": "", "tool_calls": [CALLED]}]
    called = {"type": "function", "function": {"name": "f", "arguments": {}}}
    ((problem,), _) = read_problems([("f:1", {"messages": asked})], FileDataConfig())
    assert json.loads(problem.answer) == [called]
    others = [{**OF_OPENAI[2], "tool_calls": [{"name": name, "arguments": {"x": None}}]} for name in "fg"]
    records = [("f:1", {"messages": [*OF_OPENAI[:2], other, OF_OPENAI[3]]}) for other in others]
    first, second = read_problems(records, FileDataConfig())[0]
    assert first.question_key != second.question_key
    assert first.messages[2].others == {"tool_calls": [called]}


def test_few_records_without_a_question_or_an_answer_are_left_out_and_many_are_refused() -> None:
    good = [{"question": f"Q{i}", "answer": "A"} for i in range(18)]
    located = [
        (f"f:{i}", r)
        for i, r in enumerate([*good, {"question": " ", "answer": "A"}, {"question": "Q", "answer": None}])
    ]
    problems, note = read_problems(located, FileDataConfig())
    assert len(problems) == 18
    assert note.endswith("; 2 without question or answer are left out, the first f:18")
    with pytest.raises(ConfigError, match=r"^f:18: question: found ' '"):
        read_problems(located[1:], FileDataConfig())
