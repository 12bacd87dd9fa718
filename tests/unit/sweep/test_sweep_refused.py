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


def sweep(folder: Path, sbatch: str | None) -> list[str]:
    """What the command says on standard error where the programs of Slurm are these; it must end with code 2."""
    programs = folder / "bin"
    programs.mkdir()
    for name, text in {"sbatch": sbatch, "srun": "exit 1"}.items():
        if text is not None:
            (programs / name).write_text(f"#!/bin/sh\n{text}\n")
            (programs / name).chmod(0o755)
    others = [each for each in os.environ["PATH"].split(":") if sbatch or not Path(each, "sbatch").exists()]
    path = ":".join([str(programs), *others])
    command = [sys.executable, "-m", "megarl.train", "-m", *ONE_RUN_EACH, "algo=grpo", f"hydra.sweep.dir={folder}/a"]
    done = subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    return done.stderr.splitlines()


def test_a_refused_sweep_ends_with_what_sbatch_says_and_a_machine_without_slurm_is_named(tmp_path: Path) -> None:
    said = sweep(tmp_path, REFUSE)
    assert said[-1] == f"error: {SAID} specified"
    assert not any("Traceback" in line for line in said)
    (tmp_path / "none").mkdir()
    assert sweep(tmp_path / "none", None)[0].startswith("error: hydra/launcher: slurm needs sbatch, not found here; lo")
