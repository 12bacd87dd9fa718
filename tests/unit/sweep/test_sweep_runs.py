"""A sweep as a user types it: its folders, which runs it starts, with what, what it makes of those that fail, and how
a run's own process ends."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from megarl.config.errors import ConfigError
from megarl.config.load import CONF_DIR, check_overrides
from megarl.config.overrides import open_overrides
from megarl.config.schema.root import name_run, register
from megarl.signals import Stopped
from megarl.sweep import complete_arguments, explain_exit, run_process

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


def name(*overrides: str) -> str:
    register()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return name_run("x", _root_=compose("config", overrides=open_overrides(overrides)))


def test_a_folder_is_found_again_by_what_its_run_computes():
    assert name("seed=2", "algo.clip_high=0.3") == name("algo.clip_high=0.3", "seed=2", "logger.tensorboard=false")
    assert name("seed=2") != name("seed=3")
    # The default, given or not.
    assert name() == name("algo=vapo", "algo.clip_high=0.28")


def test_a_folder_has_no_name_that_a_shell_or_a_path_would_take_apart():
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        composed = compose("config")
    readable, _, digits = name_run("data.path=/a b/c,reward.x='$(ls)'", _root_=composed).rpartition("_")
    assert readable == "data.path=-a-b-c,reward.x=---ls--"
    assert len(digits) == 6
    assert len(name_run("k=" + "v" * 400, _root_=composed)) < 120


def test_the_command_line_is_completed_with_the_folder_the_swept_keys_and_what_optuna_should_do(tmp_path):
    arguments = ["-m", "algo=vapo", "seed=1,2", "hydra/sweeper=optuna", "hydra.sweeper.direction=minimize"]
    completed, sweep_dir = complete_arguments([*arguments, f"hydra.sweep.dir={tmp_path}/a"])
    assert sweep_dir == tmp_path / "a"
    assert completed[:5] == arguments
    assert f"hydra.sweep.dir='{tmp_path}/a'" in completed
    assert "hydra.job.config.override_dirname.exclude_keys=[algo]" in completed
    assert "hydra.sweeper.sampler.seed=1" in completed
    assert "hydra.sweeper.direction=maximize" not in completed
    on_slurm, _ = complete_arguments(["-m", "hydra/launcher=slurm", "hydra.launcher.nodes=2"])
    assert on_slurm[2] == "hydra.launcher.additional_parameters.nodes=2"
    with pytest.raises(ConfigError, match="hydra/launcher=slurm is the same plugin"):
        complete_arguments(["-m", "hydra/launcher=submitit_slurm"])
    without, folder = complete_arguments(["-m", "seed=1,2"])
    assert folder.parent == Path("runs").resolve()
    assert not any("sweeper" in text for text in without)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algo.clip_hihg=0.2,0.3"], "algo.clip_hihg: no such key; did you mean algo.clip_high?"),
        (["algo=vapo,grpo", "algo.lambda_policy=0.9,0.95"], "algo.lambda_policy: has no effect"),
        (["algo.gamma=range(0.8,1.2,0.3)"], "algo.gamma: found 1.1; it must be 0 or more"),
        (["algo.gamma=interval(0.2,0.3)"], "algo.gamma: found interval\\(0.2,0.3\\), which hydra/sweeper=optuna can"),
        (["hydra/sweeper=optuna", "algo.gamma=tag(log,interval(0.9,1.5))"], "algo.gamma: found 1.5; it must be 0 or"),
    ],
)
def test_a_wrong_key_or_value_of_any_run_is_named_before_anything_starts(overrides, expected):
    with pytest.raises(ConfigError, match=expected):
        check_overrides(overrides)


SAVING = """
import signal, sys, time
def save(number, frame):
    print("saved", signal.Signals(number).name, flush=True)
    sys.exit(128 + number)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, save)
print("ready", flush=True)
time.sleep(60)
"""


def test_what_a_run_prints_is_in_its_log_and_its_code_comes_back(tmp_path):
    log = tmp_path / "run" / "output.log"
    assert run_process(["sh", "-c", "echo one; echo two >&2; exit 3"], log, 5) == 3
    assert run_process(["sh", "-c", "echo three; kill -9 $$"], log, 5) == -9
    assert log.read_text() == "one\ntwo\nthree\n"


def test_last_words_are_not_hydras(tmp_path):
    text = "RuntimeError: out of memory\n\nSet the environment variable HYDRA_FULL_ERROR=1 for ...\n"
    (tmp_path / "log").write_text(text)
    assert explain_exit(1, tmp_path / "log") == "exit code 1: RuntimeError: out of memory"


@pytest.mark.parametrize(
    ("command", "deadline_s", "said"),
    [
        ([sys.executable, "-c", SAVING], 30, "ready\nsaved SIGTERM\n"),
        # One that heeds no signal is killed after the deadline.
        (["sh", "-c", "trap '' TERM; echo ready; sleep 60 & wait; sleep 60"], 0.2, "ready\n"),
    ],
)
def test_a_signal_ends_the_run_first_which_saves(tmp_path, command, deadline_s, said):
    log = tmp_path / "output.log"
    threading.Thread(target=signal_when_ready, args=(log,)).start()
    with pytest.raises(Stopped, match="SIGTERM"):
        run_process(command, log, deadline_s)
    assert log.read_text() == said


def signal_when_ready(log):
    end = time.monotonic() + 30
    while time.monotonic() < end and not (log.exists() and "ready" in log.read_text()):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
