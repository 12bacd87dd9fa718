"""`slurm/train.sh` where there is no job: --local says what would be done, anything else what to type."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPLETE = ("algo=vapo", "model=qwen32b")
ONE_NODE = ("--nodes=1", "model=qwen3_8b")


def call(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MEGARL"))}
    return subprocess.run(
        [str(ROOT / "slurm" / "train.sh"), *arguments],
        env=inherited | {"MEGARL_PYTHON": sys.executable} | variables,
        cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_local_prints_every_command_of_the_complete_preset_and_does_nothing(tmp_path: Path) -> None:
    done = call(tmp_path, "--local", *COMPLETE)
    assert done.returncode == 0, done.stderr
    assert "    sbatch slurm/train.sh algo=vapo model=qwen32b\n" in done.stdout
    assert "--nodes=8" in done.stdout
    assert f"-m megarl.train cluster=slurm algo=vapo model=qwen32b hydra.run.dir=\\'{tmp_path}/runs" in done.stdout
    assert "--attach JOBID" in call(tmp_path, "--help").stdout
    assert done.stdout.count("srun ") == 4
    for line in ("8 nodes x 8 GPUs", "policy: 64 processes on nodes 1 to 8, 64 GPUs", "servers: 8 processes on"):
        assert line in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "code", "lines"),
    [
        (("--time=0-12", *COMPLETE), 0, ("Total: up to 176.0 hours on 64", "12 hours: up to 15 requeues;", "@3000")),
        (("--time=1:30:00", *COMPLETE), 2, ("error: --hours: found 1.5; with 1.7 half of it is left to train",)),
        ((*ONE_NODE, "cluster.hardware.gpu=null"), 0, ("none (cluster.hardware.gpu: found null)",)),
        ((*ONE_NODE, "train.tokens_per_microbatch=99999"), 1, ("does not fit:", "nearest change: ")),
    ],
)
def test_local_has_the_plan(tmp_path: Path, words: tuple[str, ...], code: int, lines: tuple[str, ...]) -> None:
    done = call(tmp_path, "--local", *words)
    assert done.returncode == code, done.stderr
    said = done.stdout[done.stdout.index("The plan, of which") :]
    assert [line for line in lines if line not in said] == [], said


@pytest.mark.parametrize("options", ["--nodes=4", "-N4", "--exclusive -N 4 --gpus-per-node h100:8"])
def test_local_takes_the_options_of_sbatch_and_refuses_what_does_not_fit(tmp_path: Path, options: str) -> None:
    done = call(tmp_path, "--local", *options.split(), *COMPLETE)
    assert f"sbatch {options} slurm/train.sh algo=vapo model=qwen32b" in done.stdout
    assert done.returncode == 2
    assert "need 8 nodes of 8 GPUs (cluster.gpus_per_node); there are 4 (cluster.num_nodes)" in done.stderr


def test_a_users_configuration_directory_is_passed_on_by_its_full_path(tmp_path: Path) -> None:
    (tmp_path / "mine" / "algo").mkdir(parents=True)
    (tmp_path / "mine" / "algo" / "my_algo.yaml").write_text("# @package _global_\ndefaults: [vapo]\n")
    done = call(tmp_path, "--local", "--nodes=1", "--config-dir=mine", "algo=my_algo", "model=qwen3_8b")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"-m megarl.train cluster=slurm --config-dir={tmp_path}/mine algo=my_algo" in done.stdout
    missing = call(tmp_path, "--local", "--config-dir=other", *COMPLETE)
    assert missing.returncode == 2
    assert "--config-dir: no such directory" in missing.stderr


def test_a_container_is_put_around_every_command(tmp_path: Path) -> None:
    image = {"MEGARL_IMAGE": "megarl.sif", "MEGARL_MOUNTS": "/data"}
    apptainer = call(tmp_path, "--local", "--nodes=1", MEGARL_CONTAINER="apptainer", **image).stdout
    assert apptainer.count("apptainer exec --nv") == 4
    assert "/tmp\\,/dev/shm\\,/data megarl.sif" in apptainer
    pyxis = call(tmp_path, "--local", "--nodes=1", MEGARL_CONTAINER="pyxis", **image).stdout
    assert pyxis.count("--container-image=megarl.sif") == 4
    assert "/dev/shm:/dev/shm\\,/data:/data" in pyxis


def test_submit_refuses_before_the_queue_and_calls_sbatch_otherwise(tmp_path: Path) -> None:
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text('#!/bin/sh\necho "sbatch $*"\n')
    sbatch.chmod(0o755)
    path = f"{sbatch.parent}:{os.environ['PATH']}"
    for options, message in {
        "--time=8": "600 s before the time limit of 480 s (--time=8): less than half of it is left to train; --time=20",
        "-t 0:30:00 --signal=B:USR1@1000": "1000 s before the time limit of 1800 s (--time=0:30:00)",
        "--time=soon": "--time: found soon",
        "--nodes=1 --time=1-0": "need 8 nodes of 8 GPUs",
        "--time=2:00:00": "found B:USR1@600; the plan asks for --signal=B:USR1@3000",
    }.items():
        done = call(tmp_path, "--submit", *options.split(), *COMPLETE, PATH=path)
        assert (done.returncode, done.stdout) == (2, ""), options
        assert message in done.stderr
    done = call(tmp_path, "--submit", *ONE_NODE, "train.tokens_per_microbatch=99999", PATH=path)
    assert (done.returncode, done.stdout, "does not fit:" in done.stderr) == (1, "", True)
    taken = call(tmp_path, "--submit", "--time=2:00:00", "--signal=B:USR1@3000", *COMPLETE, PATH=path)
    assert taken.stdout.endswith(f"--signal=B:USR1@3000 {ROOT}/slurm/train.sh algo=vapo model=qwen32b\n")


def test_another_command_is_run_and_checked_by_its_own_rules(tmp_path: Path) -> None:
    words = ("--command=evaluate", "data=gsm8k", "model=qwen3_8b", "rollout.num_servers=1")
    done = call(tmp_path, "--local", "--nodes=1", *words)
    assert done.returncode == 0, done.stderr
    assert "-m megarl.cli evaluate cluster=slurm data=gsm8k" in done.stdout
    assert "doctor --node --command=evaluate" in done.stdout


def test_what_a_job_cannot_do_is_refused_with_what_to_type(tmp_path: Path) -> None:
    for arguments, variables, message in [
        ((), {}, "SLURM_JOB_ID: not set; sbatch slurm/train.sh"),
        (("--local", "-m", "algo=ppo,vapo"), {}, "-m: a job is one run"),
        (("--local", "cluster.ray_address=a:1"), {}, "cluster.ray_address: train.sh starts Ray"),
        (("--local", "hydra.run.dir=${now:%Y}"), {}, "hydra.run.dir: found ${now:%Y}"),
        (("--local", "--command=serve"), {}, "--command: found 'serve'; one of train, evaluate"),
        (("--local", "--command=evaluate", "resume=x"), {}, "resume: found with --command=evaluate"),
        (("--attach",), {}, "--attach: found nothing"),
        (("--local",), {"MEGARL_SITE": "none.sh"}, "MEGARL_SITE: no such file: none.sh"),
        (("--local",), {"MEGARL_CONTAINER": "docker"}, "MEGARL_CONTAINER: found docker"),
        (("--local",), {"MEGARL_CONTAINER": "pyxis"}, "MEGARL_IMAGE: empty"),
    ]:
        done = call(tmp_path, *arguments, **variables)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: {message}")
