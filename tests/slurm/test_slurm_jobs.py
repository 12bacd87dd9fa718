"""`sbatch slurm/train.sh` on a real Slurm: over two nodes, asked to stop, cancelled, two at once, a node is lost; what
is found before a job trains; each run of `megarl.train -m hydra/launcher=slurm` is a job.
"""

import getpass
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from mini_slurm import HIDDEN_ON, MiniSlurm, wait_until
from slurm_job import Job

from megarl.report.record import load_sweep

pytestmark = pytest.mark.slow

TINY = (
    "rollout.transport=split",
    "rollout.response_length=16",
    "cluster.object_store_mb=100",
    "cluster.cpu_threads_per_worker=1",
    "train.prompts_per_iteration=4",
    "train.responses_per_prompt=4",
    "train.samples_per_minibatch=16",
    "train.eval_every=100",
)
WITH_CRITIC = (*TINY, "algo.value_pretrain.steps=1")
TWO_NODES = ("--nodes=2", "--gpus-per-node=2")
HALF_OF_TWO = ("--nodes=2", "--gpus-per-node=1")


def find_node(job: Job, log: str) -> tuple[str, str]:
    """The node and the name of the job's step of the process that writes to RUN_DIR/logs/`log`."""
    for pid, environment in job.find_processes().items():
        try:
            files = [os.readlink(f"/proc/{pid}/fd/{number}") for number in (1, 2)]
        except OSError:
            continue
        if str(job.run_dir / "logs" / log) in files:
            return environment["SLURMD_NODENAME"], name_steps(job)[environment["SLURM_STEP_ID"]]
    raise AssertionError(f"no process writes {log}:\n{job.explain()}")


def name_steps(job: Job) -> dict[str, str]:
    """What Slurm calls the job's steps, by their numbers."""
    done = job.slurm.call("squeue", "--steps", "--noheader", f"--jobs={job.number}", "--format=%i %j")
    pairs = [line.split() for line in done.stdout.splitlines()]
    return {step.split(".")[1]: name for step, name in pairs}


@pytest.mark.timeout(900)
def test_a_job_over_two_nodes_stops_for_the_time_limit_goes_on_and_is_preempted(slurm: MiniSlurm, submit) -> None:
    """The policy on one node, the server on the other; both checkpoints are those of a signal. The job that preempts it
    starts only after its grace time or its end.
    """
    endless = ("train.num_iterations=100000", "checkpoint.save_every=100000")
    job = submit(*WITH_CRITIC, *endless, options=(*TWO_NODES, "--partition=low"))
    job.wait_for("iteration 1/100000")
    assert sorted(name_steps(job).values()) == ["batch", "driver", "ray"]
    assert find_node(job, "policy-0.log") == ("n1", "ray")
    assert find_node(job, "critic-0.log") == ("n1", "ray")
    assert find_node(job, "server-0.log") == ("n2", "ray")
    logs = {path.name for path in (job.run_dir / "logs" / "slurm").iterdir()}
    assert logs == {"node-n1.log", "node-n2.log", f"starts-{job.number}"}

    slurm.call("scancel", "--signal=USR1", "--batch", job.number)
    job.wait_state("PENDING")
    assert "SIGUSR1: requeued" in job.output
    job.expect_nothing_left()
    # The other came after value pretraining.
    first, checkpoint = sorted(job.run_dir.glob("checkpoints/iteration-*"))
    assert first.name == "iteration-000000"
    stopped_at = int(checkpoint.name.removeprefix("iteration-"))
    job.start_again()
    job.wait_for(f"iteration {stopped_at + 1}/100000")
    assert f"resuming from {checkpoint}" in " ".join(job.output.split())

    needs_all = ("--nodes=2", "--exclusive", "--wrap=true", "--output=/dev/null")
    slurm.call("sbatch", "--parsable", *needs_all)
    job.wait_state("PENDING", deadline_s=170)
    assert "preempted: requeued" in job.output
    assert "preempted: requeued" in (job.run_dir / "train.log").read_text()
    job.expect_nothing_left()
    last = max(job.run_dir.glob("checkpoints/iteration-*"))
    assert int(last.name.removeprefix("iteration-")) > stopped_at
    iterations = job.list_iterations()
    assert iterations == list(range(-1, len(iterations) - 1))


@pytest.mark.long
def test_two_jobs_share_nodes_one_is_cancelled_the_other_loses_a_node_and_goes_on(slurm: MiniSlurm, submit) -> None:
    forever = (*TINY, "algo=lite_ppo", "train.num_iterations=100000")
    # A checkpoint of the first is written only where it is asked to end.
    cancelled, going = (
        submit(*forever, f"checkpoint.save_every={every}", options=HALF_OF_TWO) for every in (100000, 1)
    )
    for job in (cancelled, going):
        job.wait_for("iteration 1/100000", 360)
        assert job.show("NodeList") == "n[1-2]"
    addresses = [job.output.split("Ray at ")[1].split()[0] for job in (cancelled, going)]
    assert addresses[0] != addresses[1]

    slurm.call("scancel", cancelled.number)
    cancelled.wait_state("CANCELLED")
    cancelled.wait_checkpoint()
    cancelled.expect_nothing_left()
    assert json.loads((cancelled.run_dir / "run.json").read_text())["outcome"]["why"] == "stopped by SIGTERM"
    assert psutil.pid_exists(next(iter(going.find_processes())))

    slurm.lose_node("n2")
    going.wait_state("PENDING")
    # On the lost machine nobody can remove anything; the next start does.
    wait_until(
        lambda: going.find_left() == [f"/tmp/megarl-ray-{going.number}-1"], 120, "a clean end on n1", going.explain
    )
    before = max(going.list_iterations())
    slurm.start_node("n2")
    slurm.call("scontrol", "update", "nodename=n2", "state=resume")
    going.start_again()
    going.wait_for("resuming from")
    going.wait_for(f"iteration {before + 2}/100000")
    iterations = going.list_iterations()
    assert iterations == list(range(len(iterations)))
    assert "start 2" in going.output


def test_a_signal_before_the_run_has_begun_queues_the_job_again_and_it_begins_then(slurm: MiniSlurm, submit) -> None:
    job = submit(*WITH_CRITIC, options=TWO_NODES)
    job.wait_for("allocation: 2 nodes x 2 GPUs")
    slurm.call("scancel", "--signal=USR1", "--batch", job.number)
    job.wait_state("PENDING")
    assert "SIGUSR1: requeued" in job.output
    assert not (job.run_dir / "run.json").exists()
    job.start_again()
    job.wait_for("start 2")
    assert "resume=" not in job.output.split("start 2")[1].splitlines()[0]


def test_a_start_that_wrote_no_checkpoint_in_its_time_is_not_repeated(slurm: MiniSlurm, submit) -> None:
    job = submit(*WITH_CRITIC, options=(*TWO_NODES, "--time=1", "--signal=B:USR1@1"))
    job.wait_for("allocation: 2 nodes x 2 GPUs")
    slurm.call("scancel", "--signal=USR1", "--batch", job.number)
    job.wait_state("FAILED")
    assert (
        "SIGUSR1: this start's time is over: not requeued: 1 start brought no checkpoint (newest: none)" in job.output
    )
    assert "give it more (sbatch --time=, --signal=B:USR1@SECONDS), or make iterations shorter" in job.output


TRAIN = str(Path(__file__).resolve().parents[2] / "slurm" / "train.sh")
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


SHORT = (*TINY, "algo=lite_ppo", "train.num_iterations=1", "train.num_eval_prompts=8")
JOB = ("hydra/launcher=slurm", "hydra.launcher.nodes=2", "hydra.launcher.gpus_per_node=2")


def test_a_sweep_for_a_partition_that_does_not_exist_ends_with_what_sbatch_says(
    slurm: MiniSlurm, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "megarl.train", "-m", *JOB, "algo=vapo", "algo.clip_high=0.2,0.28"]
    done = subprocess.run(
        [*command, f"hydra.sweep.dir={tmp_path}/sweep", "hydra.launcher.partition=none"],
        env=os.environ | slurm.environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: hydra.launcher: sbatch: ")
    assert last.endswith("Batch job submission failed: Invalid partition name specified")
    assert slurm.call("squeue", "--noheader").stdout == ""


@pytest.mark.timeout(900)
def test_each_run_of_a_sweep_is_a_job_of_which_one_is_refused(slurm: MiniSlurm, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megarl.train", "-m", *JOB, *SHORT, "cluster.num_nodes=2,4"]
    try:
        done = subprocess.run(
            [*command, f"hydra.sweep.dir={tmp_path}/sweep"],
            env=os.environ | slurm.environment | {"MEGARL_PYTHON": sys.executable},
            capture_output=True, text=True, timeout=800,
        )  # fmt: skip
    finally:
        # What is left of a sweep that ended early has both nodes to itself.
        slurm.call("scancel", f"--user={getpass.getuser()}", check=False)
    sweep = load_sweep(tmp_path / "sweep")
    logs = {path.parent.name: path.read_text() for path in (tmp_path / "sweep").glob("*/output.log")}
    shown = "\n".join([done.stdout, done.stderr, *(text[-3000:] for text in logs.values())])
    assert done.returncode == 1, shown
    assert [run.state for run in sweep] == ["done", "failed"], shown
    run, refused = sweep
    assert (tmp_path / "sweep" / run.name / "logs" / "slurm").is_dir()
    assert run.config["cluster.num_nodes"] == 2
    assert "cluster.num_nodes: found 4; job " in logs[refused.name]
    assert "1 of 2 runs done" in done.stdout
