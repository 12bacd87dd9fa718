"""RUN_DIR/starts.jsonl: what each start of a run was made with, one JSON object a line; a resumed run adds one.

{"time": 1790000000.0, "objective": "policy loss = ...", "sizes": "each iteration: ...", "data": "data: 72 prompts ...",
 "versions": {"python": "3.11.2", "torch": "2.13.0", ...},
 "hardware": {"host", "cpu", "cores", "memory_gib", "gpus", "peak_tflops"}}

`time` is in seconds of Unix time; `gpus` are those of the machine that the driver runs on, as nvidia-smi names them.
`peak_tflops` is what the processors of policy and critic can do together, in 1e12 operations a second, or null.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megarl.json_text import parse_json
from megarl.report.metrics import drop_unfinished_line

FILE_NAME = "starts.jsonl"
PACKAGES = ("megarl", "torch", "megatron-core", "sglang", "ray", "transformers", "transformer-engine", "numpy")
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
TIMEOUT_S = 20.0


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


def record_start(run_dir: Path, *, objective: str, sizes: str, data: str, peak_tflops: float | None) -> None:
    """Append a line with these texts. A full disk is left to other writers.

    peak_tflops: 1e12 operations a second of the processors of policy and critic; None: it is not known.
    """
    content = {
        "time": time.time(),
        "objective": objective,
        "sizes": sizes,
        "data": data,
        "versions": find_versions(),
        "hardware": {**find_hardware(), "peak_tflops": peak_tflops},
    }
    path = run_dir / FILE_NAME
    with contextlib.suppress(OSError):
        drop_unfinished_line(path)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")


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
    return {
        "host": socket.gethostname(),
        "cpu": _find_cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _ask(*NVIDIA_SMI).splitlines(),
    }


def _find_cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _ask(*command: str) -> str:
    """What the command prints; empty where it is missing, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def load_starts(run_dir: Path, problems: list[str]) -> list[Start]:
    """The starts in order; a line that cannot be read is named in `problems`. Empty where there is no file."""
    path = run_dir / FILE_NAME
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        problems.append(f"{path}: cannot be read: {error}")
        return []
    starts = []
    for number, line in enumerate(lines, start=1):
        try:
            starts.append(_to_start(parse_json(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"{path}:{number}: is not what a run writes: {error!r}")
    return starts


def _to_start(record: Mapping[str, Any]) -> Start:
    return Start(
        float(record["time"]),
        str(record["objective"]),
        str(record["sizes"]),
        str(record["data"]),
        {str(name): str(value) for name, value in record["versions"].items()},
        dict(record["hardware"]),
    )
