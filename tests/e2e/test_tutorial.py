"""docs/tutorial.md against the run that it tells of."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CHECK_S = 540


def test_the_first_iteration_of_the_default_run_is_what_the_tutorial_tells() -> None:
    command = [sys.executable, "tools/docs/tutorial.py", "check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CHECK_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
