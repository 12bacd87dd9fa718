"""Whole sets of problems: presets on local files of the sets' own formats, what is taken and what is refused."""

import json
from dataclasses import replace

import pytest
from data_cases import build_byte_tokenizer, load_toy

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema.data import HuggingFaceDataConfig, JsonlDataConfig
from megarl.task import data as evaluation_set

RECORDS = {
    "gsm8k": {"question": "How many eggs?", "answer": "16 - 7 = <<16-7=9>>9 eggs.\n#### 1,009"},
    "aime24": {"id": 60, "problem": "Find $m+n$.", "solution": "It is $\\framebox{33}$.", "answer": "033", "url": "u"},
    "amc23": {"id": 0, "problem": "What is $x+y$?", "answer": 36.0, "url": "u", "question": "What is $x+y$?"},
}
ANSWERS = {"gsm8k": "1009", "aime24": "033", "amc23": "36"}


def build_evaluation_set(*given, **keys):
    """The prompts of the set."""
    return tuple(prompt for _, prompt in evaluation_set.build_evaluation_set(*given, **keys))


@pytest.fixture(scope="module")
def tokenizer():
    return build_byte_tokenizer()


def write_records(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_the_presets_read_files_of_the_sets_own_format(tmp_path, tokenizer, name):
    config = load_config([f"data={name}", "reward=math"], "evaluate").data
    path = write_records(tmp_path / "test.jsonl", [RECORDS[name]])
    prompts = build_evaluation_set(config, tokenizer, 1, name=name, path=path)
    assert [prompt.answer for prompt in prompts] == [ANSWERS[name]]
    question = RECORDS[name].get("question") or RECORDS[name]["problem"]
    assert prompts[0].text.endswith(f"{question}\n\nReason step by step, and put your final answer within \\boxed{{}}.")


def test_every_problem_is_taken_in_order_and_fewer_are_drawn_alike_for_the_same_seed(tmp_path, tokenizer):
    records = [{"question": f"What is {i}?", "answer": str(i)} for i in range(50)]
    path = write_records(tmp_path / "test.jsonl", records)

    def ask(seed, num_problems):
        config = JsonlDataConfig(path=path)
        found = build_evaluation_set(config, tokenizer, seed, name="jsonl", num_problems=num_problems)
        return [int(prompt.answer) for prompt in found]

    assert ask(1, None) == list(range(50)) == ask(2, 99)
    some = ask(1, 10)
    assert len(set(some)) == 10
    assert some == sorted(some) == ask(1, 10)
    assert some != ask(2, 10)


def test_the_held_out_part_is_the_set_where_there_is_one(tmp_path, tokenizer):
    heldout = write_records(tmp_path / "test.jsonl", [{"question": "a", "answer": "1"}])
    config = JsonlDataConfig(path=str(tmp_path / "no_training_part.jsonl"), heldout_path=heldout)
    assert [prompt.answer for prompt in build_evaluation_set(config, tokenizer, 1, name="jsonl")] == ["1"]
    addition = build_evaluation_set(load_toy("addition", 7), tokenizer, 1, name="addition")
    assert len(addition) == 7


def test_a_parquet_file_and_a_datasets_directory_serve_as_well(tmp_path, tokenizer):
    import datasets
    import pyarrow
    from pyarrow import parquet

    records = [RECORDS["gsm8k"]] * 3
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "test.parquet")
    datasets.DatasetDict({"test": datasets.Dataset.from_list(records)}).save_to_disk(str(tmp_path / "saved"))
    config = HuggingFaceDataConfig(path="openai/gsm8k", subset="main", heldout_split="test")
    for name in ("test.parquet", "saved"):
        found = build_evaluation_set(config, tokenizer, 1, name="gsm8k", path=str(tmp_path / name))
        assert [prompt.answer for prompt in found] == ["1009"] * 3


def test_a_prompt_that_is_too_long_is_an_error_and_not_left_out(tmp_path, tokenizer):
    records = [{"question": "a", "answer": "1"}, {"question": "word " * 200, "answer": "1"}]
    config = JsonlDataConfig(path=write_records(tmp_path / "test.jsonl", records), prompt_length=50)
    with pytest.raises(ConfigError, match=r"data\.prompt_length: found 50; the longest prompt of data=jsonl has \d+"):
        build_evaluation_set(config, tokenizer, 1, name="jsonl")


@pytest.mark.parametrize(
    ("config", "path", "message"),
    [
        (HuggingFaceDataConfig(), "gone.jsonl", r"evaluate\.paths\.s: .*gone\.jsonl does not exist"),
        (HuggingFaceDataConfig(), "notes.txt", r"evaluate\.paths\.s: .*notes\.txt; it must be a \.jsonl or \.parquet"),
        (load_toy("addition"), "notes.txt", r"evaluate\.paths\.s: .*this set is generated"),
    ],
)
def test_a_path_that_cannot_be_used_is_named_with_its_key(tmp_path, tokenizer, config, path, message):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match=message):
        build_evaluation_set(config, tokenizer, 1, name="s", path=str(tmp_path / path))


def test_a_set_that_the_hub_does_not_give_says_which_key_takes_a_local_file(tmp_path, tokenizer):
    config = replace(HuggingFaceDataConfig(), path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"^data=gsm8k: data\.path: .*; evaluate\.paths\.gsm8k=FILE reads a local"):
        build_evaluation_set(config, tokenizer, 1, name="gsm8k")
