"""The folders of examples/ and experiment=calculator, run as the docs say, with sizes for a test; the training of
docs/cli.md.
"""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config.schema.task import JsonlDataConfig
from megarl.models.checkpoint import SMOLLM2_NEEDS
from megarl.report.record import State, load_metrics, load_outcome
from megarl.task.data import read_problems

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MEGARL = (sys.executable, "-m", "megarl.cli")
SMALL = (
    *("train.num_iterations=1", "train.samples_per_iteration=16", "train.samples_per_minibatch=16"),
    *("train.responses_per_prompt=4", "train.num_eval_prompts=2", "checkpoint.save_every=null"),
)


def run(folder, *arguments):
    done = subprocess.run([*MEGARL, *arguments], cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


needs_model = pytest.mark.skipif(
    any(importlib.util.find_spec(module) is None for module in SMOLLM2_NEEDS),
    reason="needs make install EXTRAS=smollm2",
)


@needs_model
@pytest.mark.parametrize("name", ["own_task", "tool_environment"])
def test_the_example_trains_from_its_folder(short_path, name):
    folder = short_path / name
    if name == "own_task":
        run(short_path, "new", name)
    else:
        shutil.copytree(EXAMPLES / name, folder)
    readme = (folder / "README.md").read_text()
    command = ("train", "--config-dir", ".", f"experiment={name}")
    assert f"megarl {' '.join(command)}\n" in readme
    run(folder, *command, *SMALL, "hydra.run.dir=run")
    assert load_outcome(folder / "run").state is State.done
    (line,) = load_metrics(folder / "run" / "metrics.jsonl")[-1:]
    assert line["length/mean"] > 0
    assert ("critic/explained_variance" in line) == (name == "own_task")
    assert ("environment/tool_calls" in line) == (name == "tool_environment")


@needs_model
def test_the_calculator_trains(tmp_path):
    run(tmp_path, "train", "experiment=calculator", *SMALL, "hydra.run.dir=run")
    (line,) = load_metrics(tmp_path / "run" / "metrics.jsonl")[-1:]
    assert line["environment/tool_calls"] >= 0


def test_the_questions_are_whole_and_different():
    records = [json.loads(line) for line in (EXAMPLES / "own_task" / "prompts.jsonl").read_text().splitlines()]
    assert len({record["question"] for record in records}) == len(records) >= 100
    assert all(set(record) == {"question", "answer"} for record in records)


def test_the_page_shows_the_files_of_the_example_and_rows_that_are_read():
    page = (EXAMPLES.parent / "docs" / "your-task.md").read_text()
    for name in ("my_reward.py", "experiment/own_task.yaml"):
        (shown,) = re.findall(rf"^<!-- file: {name} -->\n```\w+\n(.*?)^```", page, re.M | re.S)
        assert shown == (EXAMPLES / "own_task" / name).read_text(), name
    rows = re.findall(r"^\| [^|]* \| `(\{.*?\})` \|", page, re.M)
    problems = [read_problems([("row", json.loads(row))], JsonlDataConfig())[0][0] for row in rows]
    assert len(problems) >= 5
    assert all(problem.answer for problem in problems)


@pytest.mark.long
def test_the_training_of_the_page_of_the_api_runs_and_is_found_again(tmp_path):
    (code,) = re.findall(r"^```python run\n(.*?)^```", (EXAMPLES.parent / "docs" / "cli.md").read_text(), re.M | re.S)
    (tmp_path / "script.py").write_text(code)
    command = [sys.executable, "script.py"]
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        assert "2 iterations, held-out reward" in done.stdout
    assert load_outcome(tmp_path / "runs/notebook").state is State.done
    assert (tmp_path / "runs/notebook/policy/config.json").is_file()
