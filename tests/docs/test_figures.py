"""The figures whose curves are in docs/results/curves.jsonl are drawn as tools/docs/figures.py draws them now."""

import json
from pathlib import Path

import pytest
from tool_loading import load_tool

ROWS = ({"iteration": 0, "reward/heldout": 0.1}, {"iteration": 1, "reward/mean": 0.23456}, {"iteration": 2})


def test_every_figure_is_current() -> None:
    tool = load_tool("docs/figures.py")
    for figure in {figure for figure, *_ in tool.load_rows()}:
        assert (tool.FOLDER / f"{figure}.svg").read_text() == tool.draw(figure), "python tools/docs/figures.py"


def test_the_curves_of_a_run_replace_those_of_the_same_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = load_tool("docs/figures.py")
    monkeypatch.setattr(tool, "DATA", tmp_path / "curves.jsonl")
    tool.DATA.write_text("")
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    for overrides in (["seed=1"], ["seed=2"]):
        (tmp_path / "run.json").write_text(json.dumps({"overrides": overrides}))
        tool.add_run(tmp_path, "name", "first & only", ["Reward=reward/mean"])
    (row,) = tool.load_rows().values()
    assert row["command"] == "megarl train seed=2"
    assert row["points"] == [[1, 0.2346]]
    assert "first &amp; only" in tool.draw("name")
