"""The console script, its commands, `megarl new`, and megarl.train as module and function."""

import re
import runpy
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import megarl
from megarl import cli
from megarl.config.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def call(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["megarl", *arguments])
    code = 0
    try:
        cli.main()
    except SystemExit as ended:
        code = ended.code
    output = capsys.readouterr()
    return code, output.out + output.err


def test_the_script_of_the_package_is_this_one_and_has_its_version(monkeypatch, capsys):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"megarl": "megarl.cli:main"}
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "megarl.__version__"}
    assert call(monkeypatch, capsys, "--version") == (0, f"megarl {megarl.__version__}\n")


def test_each_command_is_a_module_that_runs_and_is_listed(monkeypatch, capsys):
    text = call(monkeypatch, capsys)[1]
    assert text.startswith("usage: megarl COMMAND")
    for name, (module, _) in cli.COMMANDS.items():
        assert find_spec(module) is not None
        assert f"\n  {name} " in text


def test_a_new_task_has_all_files_of_the_example_and_takes_nothings_place(monkeypatch, capsys, tmp_path):
    mine = tmp_path / "a" / "mine"
    code, text = call(monkeypatch, capsys, "new", str(mine))
    assert (code, "README.md says" in text) == (0, True)
    assert text.endswith(f"next: cd {mine} && megarl train --config-dir . experiment=own_task\n")
    for name in ("README.md", "my_reward.py", "prompts.jsonl", "experiment/own_task.yaml"):
        assert (mine / name).read_bytes() == (ROOT / "examples" / "own_task" / name).read_bytes()
    (tmp_path / "file").write_text("")
    for taken, message in ((tmp_path / "a", "is there already"), (tmp_path / "file", "Not a directory")):
        code, text = call(monkeypatch, capsys, "new", str(taken))
        assert (code, message in text) == (2, True)
    assert call(monkeypatch, capsys, "new")[0] == 2


@pytest.mark.parametrize("name", ["report", "convert", "serve"])
def test_the_usage_of_a_command_has_its_name(monkeypatch, capsys, name):
    code, text = call(monkeypatch, capsys, name, "--help")
    assert (code, text.startswith(f"usage: megarl {name} [-h]")) == (0, True)


def test_the_help_lists_the_options_that_are_files_those_of_a_directory_of_ones_own_included():
    command = [sys.executable, "-m", "megarl.train", "--config-dir", str(ROOT / "examples" / "own_task"), "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert re.search(r"^experiment: .*guess, .*own_task", text, re.MULTILINE)
    assert re.search(r"^data: addition, aime24, ", text, re.MULTILINE)
    assert "_schema" not in text
    assert re.search(r"^seed: 1$", text, re.MULTILINE)


def test_words_that_are_no_command_are_explained(monkeypatch, capsys):
    code, text = call(monkeypatch, capsys, "trian")
    assert (code, "the commands are train, evaluate" in text) == (2, True)
    code, text = call(monkeypatch, capsys, "algo=grpo")
    assert (code, "megarl train algo=grpo" in text) == (2, True)


@pytest.mark.parametrize("first", ["import megarl", "import megarl.train", "from megarl.train import main"])
def test_megarl_train_is_a_function_whatever_was_imported_before(first):
    code = (
        f"{first}\nimport megarl\ntry:\n    megarl.train(['algo.clip_hihg=1'])\nexcept Exception as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "algo.clip_hihg: no such key; did you mean algo.clip_high?" in done.stdout


def test_python_m_megarl_train_is_still_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["megarl.train", "algo.clip_hihg=1"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("megarl.train", run_name="__main__", alter_sys=True)
    assert ended.value.code == 2
    assert "did you mean algo.clip_high" in capsys.readouterr().err


def test_a_text_in_place_of_a_list_is_refused():
    with pytest.raises(ConfigError, match=r"a list of overrides is needed: \['algo=grpo'\]"):
        megarl.train("algo=grpo")
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        megarl.tarin  # noqa: B018
