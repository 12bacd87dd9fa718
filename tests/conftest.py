"""Which tests run where `make test` runs them in several processes (pytest-xdist), and which need a GPU."""

from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
WITH_PROCESSES = ("e2e", "gpu", "parallel", "slurm")
"""Folders whose tests start processes: one worker runs a folder, test after test, and shares what they share"""
NUM_GPU = "num_gpu_tests_deselected"
DESELECTED = pytest.StashKey[int]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    deselect_gpu(config, items)
    for item in items:
        path = item.path.relative_to(TESTS)
        # Elsewhere a file stays together, for the sake of its fixtures.
        item.add_marker(pytest.mark.xdist_group(path.parts[0] if path.parts[0] in WITH_PROCESSES else path.stem))


def deselect_gpu(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without CUDA the tests marked `gpu` are deselected, and counted for the terminal."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu or has_cuda():
        return
    config.hook.pytest_deselected(items=gpu)
    items[:] = [item for item in items if item not in gpu]
    config.stash[DESELECTED] = len(gpu)
    if hasattr(config, "workeroutput"):
        config.workeroutput[NUM_GPU] = len(gpu)


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session", autouse=True)
def use_one_thread() -> None:
    """The tensors of tests are small: a second thread would mostly wait, and take the core of another worker."""
    import torch

    torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[DESELECTED] = getattr(node, "workeroutput", {}).get(NUM_GPU, 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if number := config.stash.get(DESELECTED, 0):
        terminalreporter.write_line(f"gpu: {number} tests deselected, because there is no CUDA here")
