import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
for folder in (TESTS / "unit" / "mcore", TESTS / "parallel"):
    sys.path.insert(0, str(folder))

DESELECTED = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without CUDA the tests marked `gpu` are deselected."""
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.stash[DESELECTED] = len(gpu)
    config.hook.pytest_deselected(items=gpu)
    items[:] = [item for item in items if item not in gpu]


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    number = config.stash.get(DESELECTED, 0)
    return f"gpu: {number} tests deselected, because there is no CUDA here" if number else ""
