import json
from pathlib import Path

import pyarrow
import pytest
from data_cases import build_byte_tokenizer, jsonl_config
from pyarrow import parquet

from megarl.config.errors import ConfigError
from megarl.config.schema.data import HuggingFaceDataConfig, ParquetDataConfig
from megarl.task.data import build_data

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
"""The workplace's data sets, where there are any."""
RECORDS = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(40)]


def write_jsonl(path: Path, records: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n\n" for record in records))
    return path


def test_a_file_is_split_into_disjoint_sides_that_hold_everything(tmp_path: Path) -> None:
    data = build_data(
        jsonl_config(write_jsonl(tmp_path / "a.jsonl", RECORDS), num_heldout=7), build_byte_tokenizer(), 1
    )
    assert (len(data.train), len(data.heldout), data.num_dropped) == (33, 7, 0)
    texts = [p.text for p in (*data.train, *data.heldout)]
    assert sorted(texts) == sorted(record["question"] for record in RECORDS)


def test_a_file_alone_holds_out_a_tenth(tmp_path: Path) -> None:
    data = build_data(jsonl_config(write_jsonl(tmp_path / "a.jsonl", RECORDS)), build_byte_tokenizer(), 1)
    assert (len(data.train), len(data.heldout)) == (36, 4)


def test_repeats_of_a_question_stay_on_one_side_under_ids_of_their_own(tmp_path: Path) -> None:
    repeated = [*RECORDS, *({**r, "question": r["question"].replace(" ", "  ")} for r in RECORDS), *RECORDS]
    config = jsonl_config(write_jsonl(tmp_path / "a.jsonl", repeated), num_heldout=20)
    data = build_data(config, build_byte_tokenizer(), 1)
    train, heldout = ({" ".join(p.text.split()) for p in split} for split in (data.train, data.heldout))
    assert not train & heldout
    assert (len(data.train), len(data.heldout)) == (60, 20)
    assert len({p.id for p in data.train}) == 60


def test_a_heldout_file_is_used_whole_and_its_questions_leave_training(tmp_path: Path) -> None:
    train, heldout = write_jsonl(tmp_path / "a", RECORDS), write_jsonl(tmp_path / "b", RECORDS[:5])
    tokenizer = build_byte_tokenizer()
    data = build_data(jsonl_config(train, heldout_path=str(heldout)), tokenizer, 1)
    assert (len(data.train), len(data.heldout), data.num_dropped) == (35, 5, 5)
    some = build_data(jsonl_config(train, heldout_path=str(heldout), num_heldout=2), tokenizer, 1)
    assert (len(some.train), len(some.heldout), some.num_dropped) == (38, 2, 2)
    # Short enough, all of them: what is missing is a repeat.
    assert (data.num_repeated, some.num_repeated) == (5, 2)
    with pytest.raises(ConfigError, match="every training question is held out"):
        build_data(jsonl_config(train, heldout_path=str(train)), tokenizer, 1)


def test_prompts_over_the_length_are_dropped_and_counted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a", [*RECORDS, {"question": "x" * 30, "answer": "1"}])
    tokenizer = build_byte_tokenizer()
    data = build_data(jsonl_config(path, prompt_length=30), tokenizer, 1)
    assert (data.num_dropped, data.num_repeated) == (1, 0)
    assert max(len(p.token_ids) for p in (*data.train, *data.heldout)) <= 30
    assert build_data(jsonl_config(path, prompt_length=31), tokenizer, 1).num_dropped == 0
    shortest = len("What is 0 + 0?") + 1
    with pytest.raises(ConfigError, match=f"data.prompt_length: found 3; .*shortest has {shortest} tokens"):
        build_data(jsonl_config(path, prompt_length=3), tokenizer, 1)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            b'{"question": "Q", "answer": "A"}\n\n{"question": \n',
            r"a\.jsonl:3: found .*one JSON object a line",
        ),
        (b'{"question": "Q", "answer": "A"}\n[1]\n', r"a\.jsonl:2: found a JSON list"),
        (b'{"question": "Q", "answer": "\xff"}\n', r"a\.jsonl:1: found bytes that are not UTF-8"),
        (b"PAR1\x00\x01", r"a\.jsonl:1: found 'PAR1"),
        (b"", "holds no problems"),
        (
            b'\xef\xbb\xbf{"question": "Q", "answer": "A"}\n',
            "data: all problems ask the same question",
        ),
    ],
)
def test_a_bad_line_is_located(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=expected):
        build_data(jsonl_config(path), build_byte_tokenizer(), 1)


def test_a_missing_file_names_its_key(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a", RECORDS)
    for config, expected in (
        (jsonl_config(tmp_path / "none"), "data.path: .*none does not exist"),
        (jsonl_config(tmp_path), "data.path: .* is a directory"),
        (jsonl_config(""), "data.path: found nothing"),
        (jsonl_config(path, heldout_path=str(tmp_path / "no")), "data.heldout_path: .*no does not exist"),
        (HuggingFaceDataConfig(), "data.path: found nothing"),
        (ParquetDataConfig(path=str(path)), "expected a parquet file"),
    ):
        with pytest.raises(ConfigError, match=expected):
            build_data(config, build_byte_tokenizer(), 1)


def test_parquet_gives_the_same_prompts_as_jsonl(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), tmp_path / "a.parquet")
    found = build_data(ParquetDataConfig(path=str(tmp_path / "a.parquet")), build_byte_tokenizer(), 1)
    expected = build_data(jsonl_config(write_jsonl(tmp_path / "a.jsonl", RECORDS)), build_byte_tokenizer(), 1)
    assert [(p.id, p.text, p.answer) for p in found.train] == [(p.id, p.text, p.answer) for p in expected.train]
    assert [p.id for p in found.heldout] == [p.id for p in expected.heldout]


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

    tokenizer = build_byte_tokenizer()
    whole = datasets.Dataset.from_list(RECORDS)
    whole.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=whole, test=datasets.Dataset.from_list(RECORDS[:3])).save_to_disk(tmp_path / "two")
    (tmp_path / "files").mkdir()
    write_jsonl(tmp_path / "files" / "train.jsonl", RECORDS)
    for name in ("one", "two", "files"):
        data = build_data(HuggingFaceDataConfig(path=str(tmp_path / name)), tokenizer, 1)
        assert (len(data.train), len(data.heldout)) == (36, 4), name
    config = HuggingFaceDataConfig(path=str(tmp_path / "two"), heldout_split="test")
    assert len(build_data(config, tokenizer, 1).heldout) == 3
    config.heldout_split = "validation"
    with pytest.raises(ConfigError, match=r"data.heldout_split: found 'validation'; .* has train, test"):
        build_data(config, tokenizer, 1)


@pytest.mark.usefixtures("offline")
def test_a_hub_name_offline_says_so_and_what_to_do_instead() -> None:
    config = HuggingFaceDataConfig(path="nobody/nothing")
    with pytest.raises(ConfigError, match=r"data.path: nobody/nothing: .*hub was not reached.*data=jsonl"):
        build_data(config, build_byte_tokenizer(), 1)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the workplace's shared/data; not run elsewhere")
@pytest.mark.parametrize(
    ("name", "num_problems", "answer"),
    [("gsm8k/test", 1319, "18"), ("aime24/test", 30, "204"), ("amc23/test", 40, "27")],
)
def test_the_usual_benchmark_files_are_read_unchanged(name: str, num_problems: int, answer: str) -> None:
    config = jsonl_config(SHARED / f"{name}.jsonl", prompt_length=8192)
    data = build_data(config, build_byte_tokenizer(), 1)
    prompts = (*data.train, *data.heldout)
    assert (len(prompts), data.num_dropped) == (num_problems, 0)
    assert len({p.id for p in prompts}) == num_problems
    first = [p.answer for p in prompts if p.metadata["location"].endswith(".jsonl:1")]
    assert first == [answer]
    assert not any("####" in p.answer or not p.answer for p in prompts)
