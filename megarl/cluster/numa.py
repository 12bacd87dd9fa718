"""The cores that are near a process's GPUs: copies to and from a GPU of another socket cross the link between them."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ASK_S = 30.0
"""How long nvidia-smi may take"""
PCI_DEVICES = Path("/sys/bus/pci/devices")


def bind_to_gpus(gpus: Sequence[str], devices: Path = PCI_DEVICES) -> set[int]:
    """Keep this thread, and all threads and processes that it starts, on the cores near these GPUs; returns them.

    gpus: as in CUDA_VISIBLE_DEVICES, by number or UUID. Where nvidia-smi or the kernel does not say which cores are
    near, or none of those that this process may use is, nothing changes.
    """
    allowed = os.sched_getaffinity(0)
    near = allowed & {core for bus in find_buses(gpus) for core in read_cores(devices / bus / "local_cpulist")}
    if near and near != allowed:
        os.sched_setaffinity(0, near)
    return near or allowed


def find_buses(gpus: Sequence[str]) -> list[str]:
    """The GPUs' PCI addresses as the kernel writes them, such as 0000:18:00.0; of those that nvidia-smi knows."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines()]
    # nvidia-smi writes the domain with eight digits, the kernel with four.
    return [row[2].lower()[4:] for row in rows if len(row) == 3 and (row[0] in gpus or row[1] in gpus)]


def read_cores(path: Path) -> set[int]:
    """The numbers in a list of the kernel's, such as 0-3,8; none where there is no such file."""
    try:
        parts = [part.partition("-") for part in path.read_text().strip().split(",") if part]
        return {core for first, _, last in parts for core in range(int(first), int(last or first) + 1)}
    except (OSError, ValueError):
        return set()
