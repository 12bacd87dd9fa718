"""The training of docs/python-api.md as a script, run twice: the second call finds it done."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.report.record import State, load_outcome

pytestmark = pytest.mark.slow

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python-api.md"


def test_the_training_of_the_page_runs_and_is_found_again(tmp_path):
    (code,) = re.findall(r"^```python run\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (tmp_path / "script.py").write_text(code)
    command = [sys.executable, "script.py"]
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        assert "2 iterations, held-out reward" in done.stdout
    assert load_outcome(tmp_path / "runs/notebook").state is State.done
    assert (tmp_path / "runs/notebook/policy/config.json").is_file()
