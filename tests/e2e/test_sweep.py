"""A sweep with its real parts: runs equal to runs alone, and the page of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import equal

from megarl.report.compare import format_comparison
from megarl.report.metrics import load_metrics
from megarl.report.record import load_sweep

pytestmark = pytest.mark.slow

COMMON = (
    *("algo=vapo", "algo.value_pretrain.steps=1", "train.num_iterations=2", "train.eval_every=2"),
    *("train.prompts_per_iteration=4", "train.num_eval_prompts=8", "logger.save_rollouts=true"),
)


def train(*arguments: str) -> str:
    command = [sys.executable, "-m", "megarl.train", *arguments, *COMMON]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500)
    assert done.returncode == 0, done.stdout
    return done.stdout


def read_numbers(run_dir: Path) -> list[dict[str, float]]:
    """metrics.jsonl without what is, or follows from, the time taken."""
    timed = ("time/", "perf/", "sync/seconds", "sync/verify_share")
    return [
        {k: v for k, v in line.items() if not k.startswith(timed)} for line in load_metrics(run_dir / "metrics.jsonl")
    ]


@pytest.mark.timeout(900)
def test_a_run_of_a_sweep_equals_a_run_alone_and_makes_a_page(tmp_path):
    output = train("-m", "algo.clip_high=0.28", f"hydra.sweep.dir={tmp_path}/sweep")
    assert "1 of 1 runs done" in output
    sweep = load_sweep(tmp_path / "sweep")
    assert [run.state for run in sweep] == ["done"]
    train("algo.clip_high=0.28", f"hydra.run.dir={tmp_path}/alone")
    alone, shared = tmp_path / "alone", tmp_path / "sweep" / sweep[0].name
    assert read_numbers(shared) == read_numbers(alone)
    assert (shared / "rollouts.jsonl").read_bytes() == (alone / "rollouts.jsonl").read_bytes()
    for role in ("policy", "critic"):
        theirs, ours = (load_file(folder / role / "model.safetensors") for folder in (alone, shared))
        assert theirs.keys() == ours.keys()
        assert all(equal(theirs[name], ours[name]) for name in theirs), role
    page = format_comparison("Sweep", sweep)
    for text in ("Held-out reward", "Value loss", "Response length", "algo.clip_high"):
        assert text in page
    assert not json.loads((shared / "outcome.json").read_text())["why"]
    again = train("-m", "algo.clip_high=0.28", f"hydra.sweep.dir={tmp_path}/sweep")
    assert again.count("already done") == 1
