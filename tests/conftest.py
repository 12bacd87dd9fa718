"""Which tests run where `make test` runs them in several processes (pytest-xdist), and which need a GPU."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

TESTS = Path(__file__).parent
FIRST = ("slurm", "e2e", "parallel", "gpu")
"""Folders whose tests start processes, and take longest"""
TOGETHER = ("slurm", "gpu")
"""Folders of which one worker runs all: of Slurm and of the GPU there is one. Elsewhere a worker runs whole files"""
ONE_BY_ONE = "e2e/test_tools_run.py"
"""A file whose tests any worker may run"""
NUM_GPU = "num_gpu_tests_deselected"
DESELECTED = pytest.StashKey[int]()

# How long one example takes says more of the machine's load than of the code.
settings.register_profile("megarl", deadline=None)
settings.load_profile("megarl")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    deselect_gpu(config, items)
    # What takes longest begins first, so that the workers end together.
    order = {name: number for number, name in enumerate(FIRST)}
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: order.get(item.path.relative_to(TESTS).parts[0], len(order) + (item.path not in slow)))


class FolderScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives each worker whole folders of TOGETHER, of the others whole files."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        if file.endswith(ONE_BY_ONE):
            return nodeid
        folder = file.removeprefix("tests/").split("/")[0]
        return folder if folder in TOGETHER else file

    def remove_node(self, node: Any) -> str | None:
        """xdist would hand out again, too, what a worker that died had finished: of those units no worker ever
        reports, and the session would wait without end."""
        work = self.assigned_work[node].items()
        self.assigned_work[node] = {scope: tests for scope, tests in work if not all(tests.values())}
        return super().remove_node(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FolderScheduling:
    config.option.loadscopereorder = False
    return FolderScheduling(config, log)


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


# A shell that starts tests in the background, or a CI, may ignore signals, and what tests start would inherit it.
# SIGHUP is left: nohup is to hold.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
    if signal.getsignal(number) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)

os.environ["OMP_NUM_THREADS"] = "1"
"""For this process and those that tests start: runs with small tensors, beside the tests of another worker. A second
thread would mostly wait, and the last bits of their results would depend on the machine's cores."""


@pytest.fixture(scope="session", autouse=True)
def use_one_thread() -> None:
    """As OMP_NUM_THREADS, where torch was imported before."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def keep_signal_handlers() -> Iterator[None]:
    """A command that a test runs in this process may change them: with SIGPIPE's default, a later write to a closed
    pipe would kill the worker without a word."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[DESELECTED] = getattr(node, "workeroutput", {}).get(NUM_GPU, 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if number := config.stash.get(DESELECTED, 0):
        terminalreporter.write_line(f"gpu: {number} tests deselected, because there is no CUDA here")
