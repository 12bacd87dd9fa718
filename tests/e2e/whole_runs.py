"""Whole runs of the command: how they are started, what they leave, and what two equal ones have in common."""

import contextlib
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from fakes.run import load_untimed

from megarl.report.record import load_metrics


def start(
    *arguments: str, log: Path | None = None, new_session: bool = False, **environment: str
) -> "subprocess.Popen[str]":
    """`python -m megarl.train ARGUMENTS`. What it says goes to the end of `log`, else into a pipe."""
    with contextlib.ExitStack() as stack:
        return subprocess.Popen(
            [sys.executable, "-m", "megarl.train", *arguments],
            env=os.environ | environment,
            stdout=stack.enter_context(log.open("a")) if log else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=new_session,
        )


def wait_end(run: "subprocess.Popen[str]", deadline_s: float = 600.0) -> tuple[int, str]:
    """(exit code, what came through the pipe). Raises RuntimeError where the run does not end, and kills it."""
    try:
        output, _ = run.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        run.kill()
        raise RuntimeError(f"the run did not end within {deadline_s:g} s") from None
    return run.returncode, output or ""


def train(*arguments: str, **environment: str) -> str:
    """What a run has printed that ended without an error."""
    code, output = wait_end(start(*arguments, **environment))
    assert code == 0, output
    return output


def wait_until(holds: Callable[[], object], what: str, deadline_s: float = 300.0) -> None:
    end = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end, f"waited {deadline_s:g} s for {what}"
        time.sleep(0.2)


def wait_for_iteration(run: "subprocess.Popen[str]", run_dir: Path) -> None:
    """Until the run has logged its first iteration, or has ended."""
    metrics = run_dir / "metrics.jsonl"

    def is_there() -> bool:
        lines = load_metrics(metrics) if metrics.exists() else []
        return run.poll() is not None or any(line["iteration"] >= 1 for line in lines)

    wait_until(is_there, "the first iteration")


def find_marked(folder: Path) -> list[psutil.Process]:
    """Processes that write to a file below the folder: of a run's, workers, servers and what is below them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if any(os.readlink(f"/proc/{process.pid}/fd/{n}").startswith(f"{folder}/") for n in (1, 2)):
                found.append(process)
    return found


def find_scratch(run: "subprocess.Popen[str]", tmp_path: Path) -> list[Path]:
    """Scratch folders of Ray and SGLang that this run made."""
    return [*Path("/tmp").glob(f"megarl-{run.pid}-*"), *tmp_path.glob("megarl-sglang-*")]


def summarize(run_dir: Path) -> dict[str, Any]:
    """What two equal runs have in common: hashes of weights and rollouts, and the numbers."""
    names = {"policy": "policy/model.safetensors", "critic": "critic/model.safetensors", "rollouts": "rollouts.jsonl"}
    hashes = {key: hashlib.sha256((run_dir / name).read_bytes()).hexdigest() for key, name in names.items()}
    return hashes | {"metrics": load_untimed(run_dir)}
