"""What tools/bench/calculator.py makes of evaluations and metrics."""

import json
from pathlib import Path
from types import ModuleType

import pytest
from tool_loading import load_tool

from megarl.report.estimators import compute_mean


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_tool("bench/calculator.py")


def record(problem: str, correct: bool, observation: str | None) -> dict[str, object]:
    turns = [{"action": "[call]", "observation": observation, "reward": 0.2}, {"action": "6", "observation": ""}]
    found = {"problem": problem, "prompt": "2*3", "response": "6", "correct": correct, "reward": 1.2 * correct}
    return found if observation is None else found | {"turns": turns}


def test_the_rise_of_two_shares_is_newcombes(bench: ModuleType) -> None:
    # Newcombe 1998, table II, method 10: 56/70 - 48/80 is 0.2000, with 0.0524 to 0.3339.
    before, after = (compute_mean([1.0] * right + [0.0] * wrong, 1, 0.95) for right, wrong in ((48, 32), (56, 14)))
    assert [round(value, 4) for value in bench.compute_rise(before, after)] == [0.2, 0.0524, 0.3339]


def test_calls_answered_with_an_error_are_not_counted(bench: ModuleType) -> None:
    assert bench.has_called(record("a", True, "6"))
    assert not bench.has_called(record("a", True, "error: no"))
    assert not bench.has_called(record("a", True, None))


def test_table_curve_and_episodes_are_written(bench: ModuleType, tmp_path: Path, monkeypatch, capsys) -> None:
    folders = {}
    for name, correct, observation in (("before", False, None), ("after", True, "6")):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        lines = [json.dumps(record(str(i), correct and i > 0, observation)) + "\n" for i in range(20)]
        (folders[name] / "responses.jsonl").write_text("".join(lines))
    keys = {"reward/mean": 0.5, "environment/tool_calls": 1.0, "reward/heldout": 0.6}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"iteration": 1} | keys) + "\n")
    out = tmp_path / "out"
    arguments = [str(folders["before"]), str(tmp_path), str(folders["after"]), "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["calculator.py", *arguments])
    page = tmp_path / "page.md"
    page.write_text(f"before\n{bench.BEGIN}{bench.END}\nafter\n")
    monkeypatch.setattr(bench, "PAGE", page)
    bench.main()
    table = capsys.readouterr().out
    assert "| calculator called | 0.000 (0.000 to " in table
    assert "| right answer | 0.000 (0.000 to " in table
    assert "| 0.950 (" in table
    assert (out / "calculator.svg").exists()
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert table.strip() in text
    assert "2*3[call]66" in text
