"""megarl data: prompts as the model gets them, their lengths and repeats, and answers that the reward cannot read."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.run.preview import draw_histogram, main, preview


def write(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return f"data.path={path}"


def make(number: int) -> dict[str, str]:
    """A question that the tiny task's tokenizer can read."""
    return {"question": f"{'abcdef'[number % 6] * 12}{'.' * (number // 6)}=", "answer": str(number)}


def show(*overrides: str) -> tuple[list[str], list[str]]:
    problems = list[str]()
    return list(preview(load_config(["data=jsonl", "reward=numeric", *overrides]), problems)), problems


def test_prompts_lengths_repeats_and_answers_are_shown(tmp_path: Path) -> None:
    heldout = write(tmp_path / "held.jsonl", {"question": "fedcbafedcba=", "answer": "1"}).partition("=")[2]
    records = [
        *map(make, range(20)),
        {**make(3), "answer": "77"},
        make(4),
        {"question": "fedcba..fedcba=", "answer": "1"},
        {"question": "fedcbafedcba=", "answer": "1"},
        {"question": "a" * 40, "answer": "no number"},
    ]
    lines, problems = show(
        write(tmp_path / "p.jsonl", *records), f"data.heldout_path={heldout}", "data.prompt_length=32"
    )
    text, train = "\n".join(lines), tmp_path / "p.jsonl"
    assert f"1. {train}:" in text
    assert text.count(" tokens, answer '") == 10
    assert "tokens of 25 prompts: 13 to 40, median 14, 95% at most 16; data.prompt_length=32" in text
    assert f"1 prompts are longer than data.prompt_length=32 and dropped; {train}:25 has 40" in text
    assert "1 repeats of held-out prompts are dropped from training" in text
    assert f"2 prompts of training repeat another; 1 have different answers; {train}:4" in text
    assert (
        f"1 held-out prompts differ from one of training in case, spaces or punctuation alone; {tmp_path}/held" in text
    )
    assert "a run trains on 23 prompts and holds out 1" in text
    assert lines[-1].endswith(": 1 of 25 answers tried cannot be read, 0 are not accepted")
    (problem,) = problems
    assert problem.startswith(f"{train}:25: reward=numeric with data=jsonl ")
    assert "answer 'no number' found; reward=numeric needs a number" in problem


def test_a_reader_that_has_left_ends_it_by_an_exit_code_without_a_message(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", *map(make, range(20)))
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "megarl.run.preview", "data=jsonl", "reward=numeric", path],
        stdout=writer,
        stderr=subprocess.PIPE,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_what_a_run_would_refuse_is_said_after_the_lengths(tmp_path: Path) -> None:
    lines, problems = show(write(tmp_path / "p.jsonl", *map(make, range(20))), "data.prompt_length=4", "reward=exact")
    assert any(line.startswith("20 prompts are longer than data.prompt_length=4") for line in lines)
    assert problems == ["data.prompt_length: found 4; no training prompt is left, the shortest has 13 tokens"]


def test_pairs_are_shown_with_both_responses(tmp_path: Path) -> None:
    records = [{"prompt": f"{'abcdef'[i]}..=", "chosen": "abc", "rejected": "fed"} for i in range(6)]
    path = write(tmp_path / "p.jsonl", *records)
    problems = list[str]()
    lines = list(preview(load_config(["experiment=reward_model", path, "data.num_heldout=1"]), problems))
    assert sum(line.endswith(", better") for line in lines) == 5
    assert sum("..=fed" in line for line in lines) == 5
    assert any(line.startswith("tokens of 12 conversations: 8 to 8") for line in lines)
    assert not problems


def test_the_bars_of_a_histogram_by_hand() -> None:
    # 1 to 21 in ten ranges of three; five lengths are 40 characters, one is eight.
    lines = list(draw_histogram([1, 1, 1, 1, 2, 21], "prompts", "x"))
    assert lines[0] == "tokens of 6 prompts: 1 to 21, median 1, 95% at most 21; x"
    assert lines[1].split() == ["1", "to", "3", "#" * 40, "5"]
    assert lines[-1].split() == ["19", "to", "21", "#" * 8, "1"]
    assert len(lines) == 8


def test_the_exit_code_says_whether_something_is_wrong(tmp_path, monkeypatch, capsys) -> None:
    good, bad = (write(tmp_path / f"{answer}.jsonl", *[{**make(i), "answer": answer} for i in range(20)])
                 for answer in ("7", "x"))  # fmt: skip
    for words, code, said in (
        ([good], 0, ""),
        ([bad], 1, "error: "),
        ([good, "--json"], 2, "error: --json: no such option"),
        (["data.path=none"], 2, "error: data.path: none does not exist"),
    ):
        monkeypatch.setattr(sys, "argv", ["megarl data", "data=jsonl", "reward=numeric", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert int(ended.value.code or 0) == code
        assert said in capsys.readouterr().err


def test_a_run_that_reads_no_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="learns from saved responses and reads no data"):
        list(preview(load_config(["algo=topr", "rollout.file=r.jsonl"]), []))
