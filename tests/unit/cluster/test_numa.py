"""Which cores are near which GPUs, with an nvidia-smi and a /sys made for the test."""

import os
import threading
from pathlib import Path

import pytest

from megarl.cluster.numa import bind_to_gpus, find_buses, read_cores

LINES = "0, GPU-aaaa, 00000000:18:00.0\n1, GPU-bbbb, 00000000:9A:00.0"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nprintf '{LINES}\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def bind_in_thread(gpus: list[str], devices: Path) -> set[int]:
    """The cores that a thread may use after it was bound; the test's own stay."""
    found: list[set[int]] = []

    def bind() -> None:
        bind_to_gpus(gpus, devices)
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=bind)
    thread.start()
    thread.join()
    return found[0]


def write_cores(devices: Path, bus: str, text: str) -> None:
    (devices / bus).mkdir(parents=True)
    (devices / bus / "local_cpulist").write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("text", "cores"), [("0-2,5", {0, 1, 2, 5}), ("7", {7}), ("", set()), ("none", set()), ("0-1,4-5", {0, 1, 4, 5})]
)
def test_a_list_of_the_kernels_is_read(tmp_path: Path, text: str, cores: set[int]) -> None:
    (tmp_path / "list").write_text(f"{text}\n")
    assert read_cores(tmp_path / "list") == cores


@pytest.mark.usefixtures("nvidia_smi")
def test_gpus_are_found_by_number_and_by_uuid_under_the_kernels_address() -> None:
    assert find_buses(["1"]) == ["0000:9a:00.0"]
    assert find_buses(["GPU-aaaa", "1"]) == ["0000:18:00.0", "0000:9a:00.0"]


@pytest.mark.usefixtures("nvidia_smi")
def test_a_thread_is_bound_to_the_cores_near_its_gpus(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    first = min(allowed)
    write_cores(tmp_path, "0000:18:00.0", str(first))
    write_cores(tmp_path, "0000:9a:00.0", "100000-100003")
    assert bind_in_thread(["0"], tmp_path) == {first}
    assert bind_in_thread(["0", "1"], tmp_path) == {first}
    assert bind_in_thread(["1"], tmp_path) == allowed  # those are not this job's
    assert os.sched_getaffinity(0) == allowed


def test_without_nvidia_smi_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bind_in_thread(["0"], tmp_path) == os.sched_getaffinity(0)
