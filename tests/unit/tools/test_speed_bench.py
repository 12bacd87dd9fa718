"""tools/bench/speed.py and its subjects: turns, tables, what is counted, and which cells there are."""

import argparse
import json
import sys

from tool_loading import TOOLS

sys.path.insert(0, str(TOOLS / "bench"))

import beside_trl
import speed

from megarl.config.load import load_config


def test_ways_take_turns_and_warm_ups_do_not_count():
    called = []

    def call(name):
        called.append(name)
        return {"seconds": 7.0} if name == "b" else {"bytes": len(called)}

    found = speed.take_turns({name: lambda name=name: call(name) for name in "ab"}, repeats=2, warm_up=1)
    assert called == list("ababab")
    assert [numbers["bytes"] for numbers in found["a"]] == [3, 5]
    assert all(0 <= numbers["seconds"] < 1 for numbers in found["a"])
    assert found["b"] == [{"seconds": 7.0}] * 2, "a way may measure its seconds itself"


def test_the_last_line_is_the_ratio_and_all_numbers_are_in_the_file(tmp_path, monkeypatch, capsys):
    result = speed.Result([{"way": "one", "seconds": 1.23456}, {"way": "two"}], 0.5, 2, ["a note"])
    monkeypatch.setitem(sys.modules, "sync_plan", argparse.Namespace(
        __doc__="text", add_arguments=lambda parser: parser.add_argument("--layers"), run=lambda args: result
    ))  # fmt: skip
    monkeypatch.setattr("sys.argv", ["speed.py", "sync_plan", "--layers", "3", "--json", str(tmp_path / "found.json")])
    speed.main()
    assert capsys.readouterr().out.splitlines() == [
        "| way | seconds |",
        "| --- | --- |",
        "| one | 1.235 |",
        "| two |  |",
        "a note",
        "ratio: 0.50 goal: 2",
    ]
    content = json.loads((tmp_path / "found.json").read_text())
    assert (content["subject"], content["ratio"], content["rows"][0]["seconds"]) == ("sync_plan", 0.5, 1.23456)


def test_a_cell_is_a_configuration_of_one_optimizer_step(tmp_path):
    args = argparse.Namespace(model=tmp_path, threads=2)
    for name in ("4x8x32-float32", "16x16x128-bfloat16"):
        cell = beside_trl.parse_cell(name)
        config = load_config(beside_trl.list_overrides(cell, tmp_path / "prompts.jsonl", args))
        assert config.train.num_samples == cell.num_samples
        assert config.train.num_minibatches == 1
        assert config.policy.dtype.value == cell.dtype
