"""What a stranger's or a damaged JSON file may hold ends in one ValueError that names it; so do errors of writing."""

from pathlib import Path

import pytest

from megarl.config.errors import ConfigError
from megarl.files import load_json_object, naming_file, parse_strict_json
from megarl.mcore.spec import read_architecture
from megarl.report.record import load_metrics, load_outcome
from megarl.rollout.rollout_file import load_rollouts
from megarl.run.command import load_run
from megarl.task.data import read_jsonl

DEEP = '{"a": ' * 200_000


@pytest.mark.parametrize(
    ("text", "message"), [("[1]", "holds a JSON list"), ("{", "a JSON object was expected"), (DEEP, "nested")]
)
def test_a_file_that_holds_no_object_is_named(tmp_path: Path, text: str, message: str):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=f"a.json: .*{message}"):
        load_json_object(tmp_path / "a.json")


def test_strict_json_has_no_nan():
    assert parse_strict_json('{"a": [1, 2.5]}') == {"a": [1, 2.5]}
    with pytest.raises(ValueError, match="NaN is not JSON"):
        parse_strict_json('{"a": NaN}')


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", read_architecture),
        ("metrics.jsonl", lambda folder: load_metrics(folder / "metrics.jsonl")),
        ("rollouts.jsonl", lambda folder: load_rollouts(folder / "rollouts.jsonl")),
        ("data.jsonl", lambda folder: list(read_jsonl(folder / "data.jsonl"))),
        ("run.json", load_run),
        ("run.json", load_outcome),
    ],
)
def test_a_deeply_nested_file_is_an_error_of_its_reader(tmp_path: Path, name: str, read):
    (tmp_path / name).write_text(DEEP + "\n")
    with pytest.raises((ValueError, ConfigError), match="nested too deeply"):
        read(tmp_path)


def test_a_write_that_finds_no_room_names_its_file():
    full = Path("/dev/full")
    found = pytest.raises(OSError, match="No space left on device: '/dev/full'")
    with found, naming_file(full), full.open("w") as file:
        file.write("x" * 100_000)
