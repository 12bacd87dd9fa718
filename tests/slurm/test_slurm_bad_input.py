"""What is found before a job trains: on a real Slurm, with its own words or with a line that names it."""

import os
from pathlib import Path

import pytest
from mini_slurm import HIDDEN_ON, MiniSlurm

pytestmark = pytest.mark.slow

TRAIN = str(Path(__file__).resolve().parents[2] / "slurm" / "train.sh")
TWO_NODES = ("--nodes=2", "--gpus-per-node=2")
OWN_MODEL = ("model.name=mine", "model.source=path")


def test_a_partition_that_does_not_exist_is_named_by_sbatch(slurm: MiniSlurm) -> None:
    done = slurm.call("sbatch", "--partition=nowhere", TRAIN, check=False)
    assert done.returncode == 1
    assert "invalid partition specified: nowhere" in done.stderr


def test_each_kind_of_bad_input_ends_its_job_before_ray_starts_and_is_named(
    slurm: MiniSlurm, submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = slurm.root / "hidden" / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").touch()
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    split = "rollout.transport=split"
    jobs = {
        "need 3 nodes of 1 GPUs (cluster.gpus_per_node); there are 2": submit(
            split, options=("--nodes=2", "--gpus-per-node=1")
        ),
        "cluster.num_nodes: found 4; job {job} has 2": submit(split, "cluster.num_nodes=4", options=TWO_NODES),
        f"{HIDDEN_ON}: model.path: '{model}' found": submit(
            split, *OWN_MODEL, f"model.path={model}", options=TWO_NODES
        ),
        "n1, n2: model.path: 'Qwen/Qwen2.5-32B' found": submit(
            split, *OWN_MODEL, "model.path=Qwen/Qwen2.5-32B", options=TWO_NODES
        ),
        "--nodes=2: options of sbatch stand before slurm/train.sh": submit(split, "--nodes=2", options=TWO_NODES),
        "rollout.tp: found 8; a server is on one node, which has 2 GPUs": submit("model=qwen32b", options=TWO_NODES),
    }
    smi = "[ $SLURMD_NODENAME = n1 ] && name=H100 || name=A100; echo 0, $name, 1; echo 1, $name, 1"
    write_program(tmp_path / "bin" / "nvidia-smi", smi)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    jobs["A100 on n2"] = submit(split, options=TWO_NODES)
    for message, job in jobs.items():
        job.wait_state("FAILED")
        assert message.format(job=job.number) in job.output
        assert job.show("ExitCode") == "2:0"
        assert "Ray at" not in job.output
        assert job.show("Restarts") == "0"
        assert not (job.run_dir / "run.json").exists()


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
