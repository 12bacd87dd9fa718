"""A sweep on Slurm whose jobs sbatch refuses; here a program of that name does."""

import os
import subprocess
import sys
from pathlib import Path

ONE_RUN_EACH = ("hydra/launcher=slurm", "algo.clip_high=0.2,0.28")
REFUSE = """echo 'sbatch: error: invalid partition specified: none' >&2
echo 'sbatch: error: Batch job submission failed: Invalid partition name specified' >&2
exit 1"""
SAID = "hydra.launcher: sbatch: invalid partition specified: none; Batch job submission failed: Invalid partition name"


def sweep(folder: Path, sbatch: str | None, *overrides: str) -> subprocess.CompletedProcess[str]:
    """The command where the programs of Slurm are these."""
    programs = folder / "bin"
    programs.mkdir()
    for name, text in {"sbatch": sbatch, "srun": "exit 1"}.items():
        if text is not None:
            (programs / name).write_text(f"#!/bin/sh\n{text}\n")
            (programs / name).chmod(0o755)
    others = [each for each in os.environ["PATH"].split(":") if not Path(each, "sbatch").exists()] if not sbatch else []
    path = ":".join([str(programs), *(others if not sbatch else [os.environ["PATH"]])])
    command = [sys.executable, "-m", "megarl.train", "-m", *ONE_RUN_EACH, *overrides, f"hydra.sweep.dir={folder}/sweep"]
    return subprocess.run(
        command, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_refused_sweep_ends_with_what_sbatch_says(tmp_path: Path) -> None:
    done = sweep(tmp_path, REFUSE, "algo=grpo")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"error: {SAID} specified"
    assert "Traceback" not in done.stderr


def test_a_machine_without_slurm_is_named(tmp_path: Path) -> None:
    done = sweep(tmp_path, None, "algo=grpo")
    assert done.returncode == 2
    assert done.stderr.startswith("error: hydra/launcher: slurm needs sbatch, not found here; login nodes")
