"""Addresses, network interfaces and GPUs of a process on its node."""

import os
from pathlib import Path

import pytest

from megarl.cluster.address import find_interface, use_gpus, use_interface
from megarl.cluster.nodes import Cluster, Node
from megarl.config.placement import DeviceSlot


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What is set in a test is taken back after it."""
    for name in ("MEGARL_GPUS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)
    return monkeypatch


def test_the_interface_of_the_loopback_address_is_lo(variables: pytest.MonkeyPatch) -> None:
    assert find_interface("127.0.0.1") == "lo"
    assert find_interface("192.0.2.77") is None
    use_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize(
    ("known", "gpus", "seen"),
    [
        ({}, (1,), "1"),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, (0, 3), "4,7"),
        ({"MEGARL_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"}, (1,), "3"),
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, (), "4,5"),
    ],
)
def test_a_process_sees_its_own_of_the_jobs_gpus(
    variables: pytest.MonkeyPatch, known: dict[str, str], gpus: tuple[int, ...], seen: str
) -> None:
    for name, value in known.items():
        variables.setenv(name, value)
    use_gpus(gpus)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


def test_a_gpu_that_the_job_does_not_have_here_is_named(variables: pytest.MonkeyPatch) -> None:
    variables.setenv("MEGARL_GPUS", "4,5")
    with pytest.raises(RuntimeError, match=r"GPU number 2 of the job is needed; it has 2 here \(4,5\)"):
        use_gpus((2,))


def test_seats_are_described_by_node_and_ranges_of_gpus() -> None:
    cluster = Cluster((Node("n1", "x"), Node("n2", "y")), Path("/tmp"), "127.0.0.1", "auto")
    slots = [DeviceSlot(0, (0,)), DeviceSlot(0, (1,)), DeviceSlot(0, (2,)), DeviceSlot(0, (5,)), DeviceSlot(1, (0, 1))]
    assert cluster.describe(slots) == "n1 GPU 0-2, 5; n2 GPU 0-1"
    assert cluster.describe([DeviceSlot()]) == ""
