"""The page of a run: what it reads, what it says, and that it is whole and safe."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from page_run import Page, write_page_run, write_tokens

from megarl.config.load import find_changes
from megarl.config.overrides import write_search_path
from megarl.report.page import format_run_page, read_warnings
from megarl.report.record import is_run, load_run, update_record

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = write_page_run(tmp_path_factory.mktemp("run") / "first", overrides=("algo=vapo", "algo.clip_high=0.4"))
    write_tokens(folder)
    return folder


def test_the_page_is_whole_loads_nothing_and_has_every_section(run_dir):
    run = load_run(run_dir)
    changes = find_changes(run.overrides, run.config)
    assert changes == (["algo=vapo"], {"algo.clip_high": (0.28, 0.4)})
    text = format_run_page(run, changes)
    page = Page(text)
    assert page.loads == []
    sections = ("Warnings", "Learning", "Policy", "Critic", "Trainer and rollout engine", "Time", "Configuration")
    assert all(f'<h2 id="{name.lower().replace(" ", "-")}">' in text for name in sections)
    for shown in (
        "40 of 80",
        "1.000 at 40",
        "Explained variance by position",
        "Where the time goes",
        socket.gethostname(),
    ):
        assert shown in page.text
    assert "policy loss = 1/N_tok" in page.text
    assert "Files that are missing or damaged" not in page.text
    assert "algo.clip_high 0.28 0.4" in page.text
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert len(data["charts"]) == len(page.charts)
    assert data["domain"] == [-1, 40]


def test_the_settings_in_an_experiment_of_the_users_own_are_shown_beside_the_groups_that_it_chooses(tmp_path):
    example = ROOT / "examples" / "own_task"
    given = (write_search_path([example]), "experiment=own_task", "algo=grpo", "seed=3")
    run = load_run(write_page_run(tmp_path / "run", overrides=given))
    choices, changes = find_changes(run.overrides, run.config)
    assert set(choices) == {"model=smollm2_135m", "data=jsonl", "reward=function", "algo=grpo"}
    assert changes["data.path"] == (None, "prompts.jsonl")
    assert changes["reward.path"] == (None, "my_reward.py:score")
    assert changes["rollout.response_length"] == (256, 12)
    assert changes["seed"] == (1, 3)
    assert run.problems == []


def test_a_run_in_progress_shows_what_is_there_and_says_how_to_go_on(tmp_path):
    folder = write_page_run(tmp_path / "run", 30)
    update_record(folder, outcome=None, status={"iteration": 31, "phase": "rollout", "since": 0.0, "pid": 1})
    page = Page(format_run_page(load_run(folder)))
    assert "in progress or killed, at iteration 31, in rollout" in page.text
    assert re.search(r"\d+ iterations left, about", page.text)
    assert f"megarl train resume={folder}" in page.text


@pytest.mark.parametrize("left", [(), ("run.json",), ("metrics.jsonl",)])
def test_a_page_is_made_of_whatever_files_there_are(tmp_path, left):
    folder = write_page_run(tmp_path / "run", 3)
    for path in folder.iterdir():
        if path.name not in left:
            path.write_text("{damaged" if path.suffix == ".json" else "[" * 100_000 + "\n")
    page = Page(format_run_page(load_run(folder)))
    assert "Files that are missing or damaged" in page.text
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
    assert "Warnings" in Page(format_run_page(load_run(folder))).text


def test_hostile_text_is_escaped(tmp_path):
    hostile = "</script><img src=x onerror=alert(1)>"
    folder = write_page_run(tmp_path / "a<b>")
    (folder / "train.log").write_text(f"warning: {hostile}\nwarning: {hostile}\n")
    line = {"iteration": 41, f"reward/{hostile}": 1.0}
    (folder / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text() + json.dumps(line) + "\n")
    page = Page(format_run_page(load_run(folder)))
    assert page.loads == []
    assert f"Logged {hostile}" in page.text


def test_warnings_of_a_log_are_told_from_its_other_lines(tmp_path):
    log, time = tmp_path / "train.log", "2026-01-01 10:00:00 "
    log.write_text(f"a prompt about a warning: no\n{time}warning: first\nwarning: second\n{time}warning: first\n")
    assert read_warnings(log) == {"second": "", "first": time}
    assert read_warnings(tmp_path / "none") == {}


def run_tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/report.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_command_tells_a_run_from_a_sweep_and_both_from_anything_else(run_dir, tmp_path):
    done = run_tool(run_dir, "--out", tmp_path / "page.html")
    assert done.stdout == f"40 iterations: {tmp_path / 'page.html'}\n"
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert is_run(run_dir)
    assert not is_run(run_dir.parent)
    assert run_tool(run_dir.parent, "--out", tmp_path / "sweep.html").stdout.startswith("1 runs: ")
    for arguments, reason in (([tmp_path / "empty"], "holds no run"), ([run_dir, tmp_path], "is not the folder of a")):
        refused = run_tool(*arguments)
        assert refused.returncode == 2
        assert reason in refused.stderr
