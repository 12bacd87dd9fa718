"""`python -m megarl.train` as a user types it: what it prints, what it leaves, how it ends."""

import os
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from metric_table import find_metric
from safetensors.torch import load_file
from whole_runs import find_marked, find_scratch, start, wait_end, wait_for_iteration

from megarl.config.load import load_config
from megarl.examples.toys.rewards import compute_length_score
from megarl.report.record import load_metrics
from megarl.signals import find_shared_memory

NUM_ITERATIONS = 14


def assert_left_nothing(run: "subprocess.Popen[str]", folder: Path) -> None:
    assert find_marked(folder) == []
    assert find_scratch(run, folder) == []


def test_a_run_learns_logs_and_ends_with_the_done_line_leaving_nothing(short_path):
    every = [f"{key}={NUM_ITERATIONS}" for key in ("train.num_iterations", "train.eval_every", "checkpoint.save_every")]
    fixed = ("algo.value_pretrain.steps=1", "train.profile=2", f"hydra.run.dir={short_path}/run")
    run = start(*every, *fixed, TMPDIR=str(short_path))
    code, output = wait_end(run)
    assert code == 0, output
    run_dir = short_path / "run"
    last = output.strip().splitlines()[-1]
    assert re.fullmatch(rf"done: iterations={NUM_ITERATIONS} reward/heldout=0\.\d{{4}} run_dir={run_dir}", last)
    assert "16 prompts x 16 responses = 256 samples" in output
    assert "clip(w, 0.8, 1.28) A" in output
    lines = (found := load_metrics(run_dir / "metrics.jsonl"))[-NUM_ITERATIONS - 1 :]
    assert [line["iteration"] for line in found] == [*range(len(lines) - len(found), 0), *range(NUM_ITERATIONS + 1)]
    for name in ("reward/mean", "policy/clip_frac", "critic/explained_variance", "sync/bytes", "time/rollout"):
        assert all(name in line for line in lines[1:]), name
    assert not [name for line in found for name in line if name != "iteration" and not find_metric(name)]
    # The servers follow: what they say of their responses is what the updated policy says.
    assert all(line["mismatch/kl"] < 1e-6 < line["policy/clip_frac"] for line in lines[1:])
    assert statistics.mean(line["reward/mean"] for line in lines[-3:]) > compute_best_without_reading() + 0.1
    assert list((run_dir / "tensorboard").iterdir())
    check_shutdown((run_dir / "logs" / "server-0.log").read_text())
    assert {f.name for f in (run_dir / "logs").iterdir()} >= {"policy-0.log", "critic-0.log", "server-0.log"}
    for role, head in (("policy", "lm_head.weight"), ("critic", "score.weight")):
        assert head in load_file(run_dir / role / "model.safetensors")
    assert {f.name for f in (run_dir / "profile").iterdir()} == {
        "timeline.json.gz",
        "policy-0.json.gz",
        "critic-0.json.gz",
    }
    assert_left_nothing(run, short_path)
    check_evaluation(short_path, last)


def compute_best_without_reading() -> float:
    """The most that a policy scores which says the same to all prompts: a letter in six, of the best length."""
    reward = load_config([]).reward
    wanted = [4 * dots for dots in range(1, 17)]
    return max(
        statistics.mean(compute_length_score(length / number, reward.tolerance, reward.falloff) for number in wanted)
        for length in range(1, 73)
    ) / len("abcdef")


def check_evaluation(folder: Path, last: str) -> None:
    """The trained policy has the score of training's last line where nothing but its path is typed."""
    overrides = ("model=checkpoint", f"model.path={folder}/run/policy", f"hydra.run.dir={folder}/evaluation")
    command = [sys.executable, "-m", "megarl.cli", "evaluate", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    heldout = re.search(r"reward/heldout=(\S+)", last)
    found = re.search(r"letter_count/reward=(\S+)", done.stdout.splitlines()[-1])
    assert heldout is not None
    assert found is not None
    assert found[1] == heldout[1]


def check_shutdown(server_log: str) -> None:
    """What a server writes after its last request holds no error."""
    after = server_log[server_log.rindex("HTTP/1.1") :].lower()
    assert not [word for word in ("error", "crashed", "sigquit", "exception", "traceback", "leaked") if word in after]


PLACES = """
def place(prompt, responses):
    number = len(responses)
    return [{"score": k / number, "number": number} for k in range(number)]
"""


def check_groups(line: dict[str, float]) -> None:
    """PLACES has scored whole groups in training, and groups of one in an evaluation."""
    assert (line["reward/number"], line["reward/mean"], line["reward/max"]) == (4.0, 0.375, 0.75)
    assert (line["heldout/number"], line["reward/heldout"]) == (1.0, 0.0)


@pytest.mark.slow
def test_a_signal_ends_every_process_and_leaves_nothing(short_path):
    # SIGUSR1: test_faults.py, SIGTERM: tests/unit/run/test_terminal.py.
    number = signal.SIGINT
    keys = ("algo=rloo", "train.num_iterations=1000", "train.responses_per_prompt=4", "train.samples_per_iteration=32")
    (short_path / "places.py").write_text(PLACES)
    reward = ("reward=group_function", f"reward.path={short_path}/places.py:place")
    run = start(*keys, *reward, "train.eval_every=1", f"hydra.run.dir={short_path}/run", TMPDIR=str(short_path))
    wait_for_iteration(run, short_path / "run")
    check_groups(load_metrics(short_path / "run" / "metrics.jsonl")[-1])
    children = psutil.Process(run.pid).children(recursive=True)
    assert len(find_marked(short_path)) >= 3
    assert len(find_scratch(run, short_path)) == 2
    shared = find_shared_memory(child.pid for child in children)
    run.send_signal(number)
    code, output = wait_end(run, 60)
    assert code == 128 + number, output
    assert f"stopped by {number.name}" in output
    _, alive = psutil.wait_procs(children, timeout=1)
    assert alive == []
    assert not shared & {entry.inode() for entry in os.scandir("/dev/shm")}
    assert_left_nothing(run, short_path)
