"""tools/bench/against_trl.py: its configuration, cells and table, of numbers that are made up."""

import argparse
from pathlib import Path
from types import ModuleType

import pytest
from tool_loading import load_tool

from megarl.config.load import load_config


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_tool("bench/against_trl.py")


@pytest.fixture(scope="module")
def table() -> ModuleType:
    return load_tool("bench/trl_table.py")


def make_result(trl: list[float], megarl: list[float], dtype: str = "float32") -> dict:
    """Seconds of each iteration, a quarter of TRL's and half of megarl's in generation."""
    phases = {"rollout": 0.5, "experience": 0.2, "update": 0.25, "sync": 0.05}
    return {
        "num_prompts": 4,
        "num_responses": 8,
        "response_length": 32,
        "dtype": dtype,
        "prompt_tokens": 23.0,
        "threads": 2,
        "load_average": 0.5,
        "date": "2026-11-23",
        "hardware": {"cpu": "a processor", "cores": 2},
        "megarl": {"torch": "2.13.0"},
        "trl": {"versions": {"trl": "1.16.0"}, "has_ppo": False},
        "iterations": [
            {
                "trl": {"seconds": theirs, "generation": theirs / 4, "training": theirs * 3 / 4, "lengths": [32, 32]},
                "megarl": {"seconds": ours, **{phase: ours * share for phase, share in phases.items()}},
            }
            for theirs, ours in zip(trl, megarl, strict=True)
        ],
    }


@pytest.mark.parametrize("text", ["4x8-float32", "4x8x32-float64", "4x1x32-float32", "1x3x32-float32"])
def test_a_cell_that_cannot_be_measured_is_refused(bench, text):
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        bench.parse_cell(text)


def test_every_cell_is_a_configuration_of_one_optimizer_step(bench, tmp_path):
    args = argparse.Namespace(model=tmp_path, threads=2, prompt_length=64)
    for name in bench.CELLS:
        cell = bench.parse_cell(name)
        assert cell.name == name
        config = load_config(bench.list_overrides(cell, tmp_path / "prompts.jsonl", args))
        assert config.train.num_samples == cell.num_samples
        assert config.train.num_minibatches == 1
        assert config.policy.dtype.value == cell.dtype


def test_the_ratio_is_of_neighbouring_iterations(table):
    assert table.compute_ratio(make_result([10.0, 30.0, 20.0], [5.0, 10.0, 20.0])) == pytest.approx(2.0)


def test_a_cell_below_the_goal_names_the_phase_beyond_its_part_of_trls(table):
    # Of 10 s a rollout of 5 is 3.75 beyond half of TRL's 2.5 s of generation; an update of 2.5 is below half of 7.5.
    row = table.format_row(make_result([10.0], [10.0]))
    assert row.startswith("| 4 x 8 x 32, float32 | 3.20 | 3.20 | 1.00 | 2.5 | 7.5 | 5.0 | 2.0 | 2.5 | 0.5 |")
    assert row.endswith("| rollout, 3.8 s too many |")
    assert table.format_row(make_result([21.0], [10.0])).endswith("|  |")


def test_the_page_has_the_finished_cells_in_order(bench, table, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(f"head\n\n{table.BEGIN}{table.END}\n")
    monkeypatch.setattr(table, "PAGE", page)
    for dtype in ("bfloat16", "float32"):
        text = table.json.dumps(make_result([20.0], [10.0], dtype))
        Path(tmp_path / f"4x8x32-{dtype}.json").write_text(text)
    table.write_page(tmp_path, bench.CELLS)
    text = page.read_text()
    assert 0 < text.index("| 4 x 8 x 32, float32 |") < text.index("| 4 x 8 x 32, bfloat16 |")
    assert "- TRL: trl 1.16.0\n" in text
    assert "a processor, 2 of 2 cores, 1 iteration of" in text
