"""Transformer Engine's layers, as far as a machine without a GPU can build them: on torch's meta device."""

import json
import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
COUNTS = Path(__file__).with_name("layer_counts.py")
IS_INSTALLED = PathFinder.find_spec("transformer_engine") is not None


def count(layers: str) -> dict[str, Any]:
    """The parameters of every preset, counted in a process of its own, since Megatron is imported in one way only."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(COUNTS), layers]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.skipif(not IS_INSTALLED, reason="Transformer Engine is not installed; CONTRIBUTING says how it is tested")
def test_transformer_engines_layers_have_the_parameters_of_the_local_ones_in_every_preset() -> None:
    assert count("transformer_engine") == count("local")
