"""What a command refuses before anything starts: one line for each problem, and code 2, through its entry point."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megarl import evaluate, train
from megarl.config.load import load_config
from megarl.config.placement import check_cluster
from megarl.run.command import split_arguments
from megarl.run.machine import CONNECT_S, check_machine

WORDS = [
    ("algo=null", "algo: found null; the choices are bpco, cispo,"),
    ("model=null", "model: found null; the choices are"),
    ("data=null", "data: found null; the choices are"),
    ("reward=NULL", "reward: found NULL; the choices are"),
    ("train=null", "train: found null; the choices are default"),
    ("experiment=null", "experiment: found null; the choices are"),
    ("algo=", "algo: found nothing; the choices are"),
    ("algo=null,grpo", "algo: found null; the choices are"),
    ("=3", "=3: found without a key"),
    ("seed", "seed: found without a value; each argument must be key=value, or group=option"),
    ("grpo", "grpo: found without a value; each argument must be key=value, or group=option; did you mean algo=grpo?"),
    ("algo", "algo: found without a value; each argument must be key=value, or group=option: algo= and one of bpco,"),
    ("+x", "+x: found without a value"),
    ("", "found an empty argument"),
    ("  ", "found an empty argument"),
    ("a=b=c", "a=b=c: mismatched input"),
    ("algo.kl={a", "algo.kl={a: "),
]
OF_THE_MACHINE = [
    ("cluster.listen_host=203.0.113.7", "cluster.listen_host: found 203.0.113.7, which is no IPv4 address or name of"),
    ("cluster.ray_address=no.such.host.invalid:1", "cluster.ray_address: found no.such.host.invalid:1, where nothing"),
    ("cluster.object_store_mb=10000000", "cluster.object_store_mb: found 10000000; this machine has"),
    ("cluster.num_nodes=2", "cluster."),
]
NUMBERS = [
    ("seed=4294967296", "seed: found 4294967296; it must be 0 or more and at most 4294967295 (SGLang"),
    ("model.random.seed=-1", "model.random.seed: found -1"),
    (
        "train.prompts_per_iteration=1000000000",
        "train.prompts_per_iteration: found 1000000000, which with 16 responses",
    ),
    (
        "train.samples_per_iteration=1000000000",
        "train.samples_per_iteration: found 1000000000, which with 16 responses",
    ),
    ("train.responses_per_prompt=1000000000", "train.responses_per_prompt: found 1000000000"),
    ("train.epochs_per_iteration=1000000000", "train.epochs_per_iteration: found 1000000000; it must be 1 or more and"),
    ("rollout.max_staleness=1000000", "rollout.max_staleness: found 1000000; it must be 0 or more and at most 100"),
    ("rollout.response_length=1000000000", "train.samples_per_iteration: found 256, which makes up to 256"),
    ("rollout.num_servers=1000000000", "rollout.num_servers: found 1000000000"),
    ("rollout.num_threads=100000", "rollout.num_threads: found 100000; it must be 1 or more and at most 1024"),
    ("rollout.max_running_requests=1000000000", "rollout.max_running_requests: found 1000000000"),
    ("rollout.sync_bucket_mb=1000000000", "rollout.sync_bucket_mb: found 1000000000"),
    ("rollout.temperature=1e-9", "rollout.temperature: found 1e-09; it must be 0.01 or more and at most 100"),
    ("policy.parallel.num_processes=1000000000", "policy.parallel.num_processes: found 1000000000; it must be 1 or"),
    ("critic.updates_per_policy_update=1000000000", "critic.updates_per_policy_update: found 1000000000"),
    ("cluster.cpu_threads_per_worker=100000", "cluster.cpu_threads_per_worker: found 100000; it must be 1 or more and"),
    ("cluster.object_store_mb=1", "cluster.object_store_mb: found 1; it must be 75 or more"),
    ("cluster.gpus_per_node=1000000000", "cluster.gpus_per_node: found 1000000000"),
    ("cluster.nodes_deadline_s=nan", "cluster.nodes_deadline_s: found nan; it must be 1 or more"),
    ("cluster.worker_start_deadline_s=0.001", "cluster.worker_start_deadline_s: found 0.001; it must be 10 or more"),
    ("cluster.call_deadline_s=0.001", "cluster.call_deadline_s: found 0.001; it must be 1 or more"),
    ("cluster.shutdown_deadline_s=0.001", "cluster.shutdown_deadline_s: found 0.001"),
    ("rollout.startup_deadline_s=0.001", "rollout.startup_deadline_s: found 0.001; it must be 10 or more"),
    ("rollout.request_deadline_s=0.001", "rollout.request_deadline_s: found 0.001"),
    ("rollout.sync_deadline_s=1e18", "rollout.sync_deadline_s: found 1e+18; it must be 1 or more and at most 31536000"),
    ("checkpoint.stop_deadline_s=0.001", "checkpoint.stop_deadline_s: found 0.001"),
    ("model.random.num_layers=1000000000", "model.random.num_layers: found 1000000000"),
    ("model.random.init_std=nan", "model.random.init_std: found nan; it must be above 0"),
    ("reward.tolerance=inf", "reward.tolerance: found inf; it must be 1 or more"),
]
TEXTS = [
    ("algo.name=''", "algo.name: found ''; it must not be empty"),
    ("model.name=a/b", "model.name: found 'a/b'; it is a part of the run's folder"),
    ("checkpoint.best_metric=' '", "checkpoint.best_metric: found ' '; it must not be empty"),
    ("cluster.listen_host='a\nb'", "cluster.listen_host: found 'a\\nb'; it must be one line of text"),
]


def run_main(monkeypatch, capsys, arguments, module=train) -> str:
    """What `python -m MODULE ARGUMENTS` writes to stderr; it must end with code 2 before Hydra starts the run."""
    monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
    if hasattr(module, "_run_composed"):
        monkeypatch.setattr(module, "_run_composed", lambda: pytest.fail(f"{arguments} has been started"))
    with pytest.raises(SystemExit) as caught:
        module.main()
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("word", "expected"), [*WORDS, *NUMBERS, *TEXTS, *OF_THE_MACHINE])
def test_a_wrong_argument_is_one_line_and_code_2(monkeypatch, capsys, word, expected):
    line, *others = run_main(monkeypatch, capsys, [word, *(["-m"] if "," in word else [])]).splitlines()
    assert line.startswith(f"error: {expected}")
    # Each problem has one line; a cluster of two nodes has several, and so have samples of older weights.
    assert all(each.startswith("error: ") for each in others)
    assert not others or word.startswith(("cluster.num_nodes=", "rollout.max_staleness="))


@pytest.mark.parametrize("word", ["reward=null", "=3", "seed", "", "seed=4294967296"])
def test_an_evaluation_refuses_the_same(monkeypatch, capsys, word):
    (line,) = run_main(monkeypatch, capsys, ["data=gsm8k", "reward=math", word], evaluate).splitlines()
    assert line.startswith(f"error: {word.partition('=')[0]}" if word.strip("=3") else "error: ")


def test_a_swept_value_out_of_its_range_is_found_before_the_first_run_starts(monkeypatch, capsys):
    error = run_main(monkeypatch, capsys, ["-m", "seed=1,4294967296"])
    assert "seed: found 4294967296" in error


def problems_here(*overrides: str, command: str = "train") -> list[str]:
    config = load_config(overrides, command)
    assert not list(check_cluster(config, command))
    return list(check_machine(config, command))


def test_the_default_job_is_possible_here():
    assert problems_here() == []


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid", "::1", "x y"])
def test_an_address_that_is_not_this_machines_is_refused(host):
    (problem,) = problems_here(f"cluster.listen_host='{host}'")
    assert problem.startswith(f"cluster.listen_host: found {host}, which is no IPv4 address or name of this machine")
    assert "it must be auto, or one of" in problem
    assert "127.0.0.1" in problem


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "auto"])
def test_an_address_of_this_machine_is_accepted(host):
    assert problems_here(f"cluster.listen_host={host}") == []


def test_a_ray_address_where_nothing_listens_is_refused_and_a_listening_one_accepted():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        (problem,) = problems_here(f"cluster.ray_address={address}")
        assert problem.startswith(f"cluster.ray_address: found {address}, where nothing answers")
        listener.listen()
        assert problems_here(f"cluster.ray_address={address}") == []
    (problem,) = problems_here("cluster.ray_address=no.such.host.invalid:6379")
    assert "no.such.host.invalid:6379, where nothing answers" in problem
    assert CONNECT_S <= 10


def test_auto_is_refused_where_the_environment_has_no_address(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (problem,) = problems_here("cluster.ray_address=auto")
    assert problem.startswith("cluster.ray_address: found auto, which stands for the environment variable RAY_ADDRESS")


def test_an_object_store_larger_than_the_memory_is_refused_with_what_there_is():
    (problem,) = problems_here("cluster.object_store_mb=10000000")
    assert problem.startswith("cluster.object_store_mb: found 10000000; this machine has ")


def test_more_threads_than_cores_are_refused():
    cores = os.cpu_count() or 1
    problems = problems_here(f"cluster.cpu_threads_per_worker={cores + 1}", f"rollout.num_threads={cores + 1}")
    assert [problem.split(":")[0] for problem in problems] == ["cluster.cpu_threads_per_worker", "rollout.num_threads"]
    assert all(f"found {cores + 1}; this machine has {cores} cores" in problem for problem in problems)
    (problem,) = problems_here("data=gsm8k", "reward=math", f"rollout.num_threads={cores + 1}", command="evaluate")
    assert problem.startswith("rollout.num_threads")


def test_more_processes_than_fit_into_the_memory_are_refused():
    number = psutil.virtual_memory().total // (100 * 2**20) + 1
    (problem,) = problems_here(f"rollout.num_servers={number}")
    assert problem.startswith(f"cluster: policy 1 + critic 1 + servers {number} processes, each with 100 MiB")


def test_a_cache_that_does_not_fit_into_the_memory_is_refused(monkeypatch):
    monkeypatch.setattr("megarl.run.machine.find_memory", lambda: 8 * 2**30)
    (problem,) = problems_here("rollout.kv_cache_tokens=1000000000")
    assert problem.startswith("rollout.kv_cache_tokens: found 1000000000, which take 59 GiB at least; this machine has")


def test_an_iteration_whose_responses_do_not_fit_into_the_memory_is_refused(monkeypatch):
    monkeypatch.setattr("megarl.run.machine.find_memory", lambda: 8 * 2**30)
    (problem,) = problems_here(
        "train.prompts_per_iteration=65536", "rollout.response_length=200", "data.prompt_length=8"
    )
    assert problem.startswith("train.prompts_per_iteration: found 65536; 1048576 responses of up to")
    assert "take 17 GiB in the trainer, and this machine has 8 GiB" in problem


@pytest.mark.parametrize(
    ("words", "options", "others"),
    [
        (["-m", "seed=1,2", "algo=vapo"], ["-m"], ["seed=1,2", "algo=vapo"]),
        (["--cfg", "job", "seed=1"], ["--cfg", "job"], ["seed=1"]),
        (["seed=1", "--info", "searchpath", "grpo"], ["--info", "searchpath"], ["seed=1", "grpo"]),
        (["--info", "seed=1"], ["--info"], ["seed=1"]),
        (["-p", "_global_", "", "~algo"], ["-p", "_global_"], ["", "~algo"]),
        (["-sc", "install=bash"], ["-sc"], ["install=bash"]),
    ],
)
def test_hydras_options_keep_their_values(words, options, others):
    assert split_arguments(words) == (options, others)


def start(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = f"{sys.executable} -m {' '.join(arguments)}"
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **variables},
        check=False,
    )


@pytest.mark.parametrize(
    "words", [("megarl.train", "--help"), ("megarl.train", "--cfg", "job"), ("megarl.evaluate", "--help")]
)
def test_help_into_a_pipe_that_is_closed_leaves_no_traceback(words):
    done = start(*words, "|", "python3", "-c", "'import os; os.close(0)'")
    assert done.stderr == ""


def test_hydras_shell_completion_can_be_installed_and_completes_a_group():
    installed = start("megarl.train", "-sc", "install=bash")
    assert installed.returncode == 0, installed.stderr
    assert "complete" in installed.stdout
    assert "hydra" in installed.stdout
    asked = start("megarl.train", "-sc", "query=bash", COMP_LINE="train algo=gr", COMP_POINT="13", COMP_CWORD="1")
    assert asked.stdout.split() == ["algo=grpo"], asked.stderr


def test_a_refused_command_leaves_no_folder(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "megarl.train", "seed=4294967296"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: seed: found 4294967296")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
