"""A sweep as a user types it: which runs it starts, with what, and what it makes of those that fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fake_runs.py")


def sweep(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "-m", *arguments, f"hydra.sweep.dir={directory}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def read_calls(directory: Path) -> list[list[str]]:
    """The commands that were started: module and arguments; forgotten once read."""
    path = directory / "calls.jsonl"
    calls = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    path.unlink(missing_ok=True)
    return calls


def test_a_failing_run_does_not_end_the_sweep_and_a_rerun_does_only_what_is_missing(tmp_path):
    first = sweep(tmp_path, "algo=vapo", "algo.clip_high=0.2,0.3,0.4,0.28")
    calls = read_calls(tmp_path)
    assert [call[0] for call in calls] == ["megarl.train"] * 4
    assert first.returncode == 1, first.stdout + first.stderr
    assert "2 of 4 runs done" in first.stdout
    assert "exit code 2: model.path: nothing there" in first.stdout
    assert "killed by SIGKILL: iteration 1/80" in first.stdout
    assert "Traceback" not in first.stderr

    again = sweep(tmp_path, "algo=vapo", "algo.clip_high=0.2,0.3,0.4,0.28")
    calls = read_calls(tmp_path)
    folder = next(tmp_path.glob("algo.clip_high=0.4_*"))
    assert [[text for text in call if text.startswith("algo.clip_high")] for call in calls] == [
        ["algo.clip_high=0.3"],
        ["algo.clip_high=0.4"],
    ]
    assert calls[1][1] == f"resume={folder}"
    assert "3 of 4 runs done" in again.stdout

    (tmp_path / "mended").touch()
    wider = sweep(tmp_path, "algo.clip_high=0.28,0.22,0.3,0.2,0.4", "algo=vapo")
    calls = read_calls(tmp_path)
    assert wider.returncode == 0, wider.stdout + wider.stderr
    assert "5 of 5 runs done" in wider.stdout
    assert [call[0] for call in calls] == ["megarl.train"] * 2


@pytest.mark.slow
def test_optuna_maximises_the_held_out_reward_and_goes_on_where_it_was(tmp_path):
    arguments = ("hydra/sweeper=optuna", "algo=vapo", "algo.clip_high=interval(0.2,0.28)", "hydra.sweeper.n_trials=6")
    first = sweep(tmp_path, *arguments)
    assert first.returncode == 0, first.stdout + first.stderr
    results = (tmp_path / "optimization_results.yaml").read_text()
    best = max(
        json.loads(path.read_text())["outcome"]["results"]["reward/heldout"] for path in tmp_path.glob("algo*/run.json")
    )
    assert f"best_value: {best}" in results
    calls = read_calls(tmp_path)
    assert len(calls) == 6
    more = sweep(tmp_path, *arguments[:3], "hydra.sweeper.n_trials=8")
    assert more.returncode == 0, more.stdout + more.stderr
    assert len(read_calls(tmp_path)) == 2


SBATCH = """#!/bin/sh
echo 'sbatch: error: invalid partition specified: none' >&2
echo 'sbatch: error: Batch job submission failed: Invalid partition name specified' >&2
exit 1
"""
SAID = "hydra.launcher: sbatch: invalid partition specified: none; Batch job submission failed: Invalid partition name"


@pytest.mark.parametrize(
    ("has_sbatch", "said"), [(True, SAID), (False, "hydra/launcher: slurm needs sbatch, not found here; lo")]
)
def test_what_sbatch_refuses_is_said_in_its_words_and_a_machine_without_slurm_is_named(tmp_path, has_sbatch, said):
    folders = [each for each in os.environ["PATH"].split(":") if has_sbatch or not Path(each, "sbatch").exists()]
    for name, text in {"sbatch": SBATCH, "srun": "#!/bin/sh\nexit 1\n"}.items():
        if has_sbatch or name == "srun":
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
    job = ("-m", "hydra/launcher=slurm", "algo.clip_high=0.2,0.28", "algo=grpo", f"hydra.sweep.dir={tmp_path}/a")
    environment = os.environ | {"PATH": ":".join([str(tmp_path), *folders])}
    command = [sys.executable, "-m", "megarl.train", *job]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: {said}")
    assert "Traceback" not in done.stderr
