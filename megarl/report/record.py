"""What a run leaves in its folder about itself, beside its metrics, and the whole of it read again.

run.json is one object, which is replaced whole at each start, phase and end:

overrides, config, directory: what the run was started with, for resuming (`megarl.run.command.save_run`).

starts: what each start was made with, the fields of `Start`.

status: the current phase, for monitoring from outside: {"iteration": 3, "phase": "rollout", "since": 1790000000.0,
"pid": 4711}. `iteration` is the current one; `phase` is null between phases; `since` is in seconds of Unix time.

outcome: how it ended: {"state": "done", "why": "", "results": {"iterations": 80, "reward/heldout": 0.98}}. `state` is
done, failed or stopped (by a signal, after its checkpoint was written); `why` is the reason where it is not done, and
what ended it where it is done before its last iteration. Null for a run in progress or one whose process was killed.
"""

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import psutil
from pydantic import TypeAdapter

from megarl.files import RUN_FILE, load_json_object
from megarl.report.metrics import FILE_NAME, History, add_mfu, load_history

HYDRA_FOLDER = ".hydra"
HELDOUT = "reward/heldout"
LONGEST_WHY = 2000
PACKAGES = ("megarl", "torch", "megatron-core", "sglang", "ray", "transformers", "transformer-engine", "numpy")
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
UNFINISHED = "unfinished"
"""The state of a run that is in progress or was killed: it has no outcome"""
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""What reading a file raises that is not what a run writes"""


def load_record(run_dir: Path) -> dict[str, Any]:
    """What run.json has; empty where there is none. Raises ValueError that names it where it is no object."""
    path = run_dir / RUN_FILE
    return load_json_object(path) if path.exists() else {}


def update_record(run_dir: Path, **fields: Any) -> None:
    """Replace these fields of run.json, atomically. It is not synced to disk; a full disk is left to other writers, and
    a damaged file stays as it is.
    """
    path = run_dir / RUN_FILE
    partial = path.with_name(f".{path.name}.partial")
    with contextlib.suppress(OSError, ValueError):
        run_dir.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(load_record(run_dir) | fields, indent=1), encoding="utf-8")
        partial.replace(path)


def write_status(run_dir: Path, iteration: int, phase: str | None) -> None:
    update_record(run_dir, status={"iteration": iteration, "phase": phase, "since": time.time(), "pid": os.getpid()})


class State(Enum):
    done = "done"
    failed = "failed"
    stopped = "stopped"


@dataclass(frozen=True)
class Outcome:
    state: State
    why: str = ""
    results: Mapping[str, float] = field(default_factory=dict)
    """The numbers of the line `done: ...`, without those that are not finite"""


def write_outcome(run_dir: Path, outcome: Outcome) -> None:
    results = {name: value for name, value in outcome.results.items() if math.isfinite(value)}
    why = outcome.why[:LONGEST_WHY]
    update_record(run_dir, outcome={"state": outcome.state.value, "why": why, "results": results})


def clear_outcome(run_dir: Path) -> None:
    """The run has not ended. A run.json that says only how a run failed before it began is removed."""
    with contextlib.suppress(ValueError):
        if "config" in load_record(run_dir):
            update_record(run_dir, outcome=None)
        else:
            (run_dir / RUN_FILE).unlink(missing_ok=True)


def load_outcome(run_dir: Path) -> Outcome | None:
    """None where the run has not ended. Raises ValueError naming the file where it is not valid."""
    try:
        return TypeAdapter(Outcome | None).validate_python(load_record(run_dir).get("outcome"))
    except ValueError as error:
        raise ValueError(f"{run_dir / RUN_FILE}: is not what a run writes: {error!r}") from None


@dataclass(frozen=True)
class Start:
    """One start of a run."""

    time: float
    """Seconds of Unix time"""
    objective: str
    """The printed formulas, a line each"""
    sizes: str
    data: str
    versions: Mapping[str, str]
    hardware: Mapping[str, Any]
    """host, cpu, cores, memory_gib, gpus (of the driver's machine, as nvidia-smi names them), and peak_tflops: what the
    processors of policy and critic can do together, in 1e12 operations a second, or null"""


def record_start(run_dir: Path, *, objective: str, sizes: str, data: str, peak_tflops: float | None) -> None:
    hardware = {**find_hardware(), "peak_tflops": peak_tflops}
    start = Start(time.time(), objective, sizes, data, find_versions(), hardware)
    update_record(run_dir, starts=[*load_record(run_dir).get("starts", []), asdict(start)])


def find_versions() -> dict[str, str]:
    """The version of Python and of each of PACKAGES that is installed, and megarl's commit in a checkout."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    here = Path(__file__).resolve().parents[2]
    if (here / ".git").exists() and (commit := _ask("git", "-C", str(here), "describe", "--always", "--dirty")):
        found["megarl's commit"] = commit
    return found


def find_hardware() -> dict[str, Any]:
    """Of this machine: its name, processor, cores that this process may use, memory in GiB, GPUs."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {
        "host": socket.gethostname(),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _ask(*NVIDIA_SMI).splitlines(),
    }


def _ask(*command: str) -> str:
    """What the command prints; empty where it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder has it, while it trains or after; files that are missing or damaged are `problems`."""

    directory: Path
    name: str
    """What tells it from the other runs on a page: the name of its folder, if need be with folders above"""
    state: str
    """done, failed, stopped or unfinished"""
    why: str
    """The reason why it is not done, or done before its last iteration; else empty"""
    config: Mapping[str, Any]
    """The plain value of each dotted key, as far as it is known"""
    overrides: Sequence[str]
    starts: Sequence[Start]
    history: History
    problems: list[str]

    @property
    def num_iterations(self) -> int | None:
        """How many the run is to have; None: not known"""
        found = self.config.get("train.num_iterations")
        return found if isinstance(found, int) else None


def is_run(directory: Path) -> bool:
    """Whether it is the folder of a run, and not of a sweep or anything else."""
    return any((directory / name).is_file() for name in (RUN_FILE, FILE_NAME))


def load_runs(directories: Sequence[Path]) -> list[RunRecord]:
    """The runs in these folders, with names that differ."""
    above = Path(os.path.commonpath(directories))
    return [replace(load_run(path), name=str(path.relative_to(above))) for path in directories]


def load_sweep(directory: Path) -> list[RunRecord]:
    """All folders below `directory` in which a run has begun, sorted by name. A missing folder has no runs."""
    begun = {path.parent for name in (HYDRA_FOLDER, RUN_FILE) for path in directory.glob(f"*/{name}")}
    return [load_run(path) for path in sorted(begun) if ".aside-" not in path.name]


def load_run(directory: Path) -> RunRecord:
    """Everything but the responses; nothing here raises."""
    problems: list[str] = []
    state, why, starts = UNFINISHED, "in progress or killed, at an unknown point", list[Start]()
    config, overrides = dict[str, Any](), list[str]()
    try:
        record = load_record(directory)
        if "config" in record:
            config, overrides = dict(record["config"]), [str(text) for text in record["overrides"]]
        starts = TypeAdapter(list[Start]).validate_python(record.get("starts", []))
        if (outcome := load_outcome(directory)) is not None:
            state, why = outcome.state.value, outcome.why
        elif (status := record.get("status")) is None:
            why = "in progress or killed, before its processes were started"
        else:
            phase = status["phase"] or "no phase"
            why = f"in progress or killed, at iteration {int(status['iteration'])}, in {phase}"
    except DAMAGED as error:
        problems.append(f"{directory / RUN_FILE}: is not what a run writes: {error!r}")
    history = load_history(directory / FILE_NAME, problems)
    # A run that goes on elsewhere is measured by its newest machine.
    if starts and (peak := starts[-1].hardware.get("peak_tflops")):
        add_mfu(history, float(peak))
    return RunRecord(directory, directory.name, state, why, config, overrides, starts, history, problems)


def format_outcomes(runs: Sequence[RunRecord]) -> str:
    """A table for the terminal: how each run ended, and why where it is not done."""
    rows = [["run", "state", "iterations", "held-out reward", "why"]]
    for run in runs:
        shown = f"{run.history.last[HELDOUT]:.4f}" if HELDOUT in run.history.last else ""
        rows.append([run.name, run.state, str(run.history.num_iterations), shown, *run.why.splitlines()[:1]])
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
