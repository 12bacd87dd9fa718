"""The folders of examples/, run as their READMEs say from where they are, with sizes for a test; the training of
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

from megarl.models.checkpoint import SMOLLM2_NEEDS
from megarl.report.record import State, load_metrics, load_outcome

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
@pytest.mark.parametrize("name", ["own_task", "gsm8k_smollm2", "tool_environment"])
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
    if name == "tool_environment":
        assert line["environment/tool_calls"] >= 0


def test_the_samples_are_whole_and_small():
    for name, fields in (("own_task", {"question", "answer"}), ("gsm8k_smollm2", {"question", "answer"})):
        (path,) = (EXAMPLES / name).glob("*.jsonl")
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert len({record["question"] for record in records}) == len(records) >= 100
        assert all(set(record) == fields for record in records)


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
