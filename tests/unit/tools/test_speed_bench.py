"""tools/bench/speed.py and its subjects: turns, tables, what is counted, and which cells there are."""

import argparse
import json
import sys

import pytest
import torch
from tool_loading import TOOLS

sys.path.insert(0, str(TOOLS / "bench"))

import beside_trl
import driver
import mfu
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


def test_lengths_vary_20_times_and_have_as_many_tokens():
    assert driver.choose_lengths(False, 3, 8) == [8, 8, 8]
    lengths = driver.choose_lengths(True, 64, 8192)
    assert sum(lengths) == 64 * 8192
    assert max(lengths) == 8192
    assert sorted(lengths)[1] < 8192 / 15  # the first is what was left


def test_products_and_attention_are_counted_and_nothing_else():
    counted = ("aten::mm", "aten::bmm", "aten::_scaled_dot_product_flash_attention_for_cpu_backward")
    assert all(map(mfu.is_counted, counted))
    assert not any(map(mfu.is_counted, ("aten::mul", "aten::copy_", "aten::_softmax", "aten::mm_like")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="operators of the CPU")
def test_a_profile_names_the_operators_outside_products():
    weight = torch.randn(64, 64, requires_grad=True)
    first, *others = mfu.describe_profile(lambda: (torch.randn(512, 64) @ weight).sigmoid().sum().backward())
    assert "products and attention" in first
    assert any("aten::sigmoid" in line for line in others)
    assert not any("aten::mm" in line for line in others)


def test_a_share_is_of_the_operations_that_the_phase_counts():
    args = argparse.Namespace(dtype="float32", tokens_per_microbatch=64)
    found = mfu.measure_share(lambda: float(torch.ones(1)), args)
    assert found["tflops"] == pytest.approx(1 / found["seconds"])
    assert mfu.measure_share(lambda: 0.0, args)["share"] == 0.0


@pytest.mark.parametrize("text", ["4x8-float32", "4x8x32-float64", "4x1x32-float32", "1x3x32-float32"])
def test_a_cell_that_cannot_be_measured_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        beside_trl.parse_cell(text)


def test_a_cell_is_a_configuration_of_one_optimizer_step(tmp_path):
    args = argparse.Namespace(model=tmp_path, threads=2)
    for name in ("4x8x32-float32", "16x16x128-bfloat16"):
        cell = beside_trl.parse_cell(name)
        config = load_config(beside_trl.list_overrides(cell, tmp_path / "prompts.jsonl", args))
        assert config.train.num_samples == cell.num_samples
        assert config.train.num_minibatches == 1
        assert config.policy.dtype.value == cell.dtype


def test_a_cell_below_the_goal_names_the_phase_beyond_its_part_of_trls():
    # Of 10 s a rollout of 5 is 3.75 beyond half of TRL's 2.5 s of generation; an update of 2.5 is below half of 7.5.
    ours = {"seconds": 10.0, "rollout": 5.0, "experience": 2.0, "update": 2.5, "sync": 0.5}
    assert beside_trl.find_costly({"generation": 2.5, "training": 7.5}, ours) == ("rollout", 3.75)
