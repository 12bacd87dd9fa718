"""The processes that run the tests (tests/conftest.py)."""

import shutil
import subprocess
import sys
from pathlib import Path

DIES = """
import os, pytest
@pytest.mark.parametrize("number", range(4))
def test_one(number):
    if {file} == 18 and number == 1 and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), 9)
"""
CHANGES = """
import signal
def test_change(): signal.signal(signal.SIGPIPE, signal.SIG_DFL)
def test_next(): assert signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN
"""


def test_all_tests_are_run_though_a_worker_dies_or_a_test_changes_a_signals_handler(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path / "tests")
    (tmp_path / "pytest.ini").touch()
    for number, source in enumerate([*(DIES.format(file=file) for file in range(20)), CHANGES]):
        (tmp_path / f"tests/test_{number}.py").write_text(source)
    words = [sys.executable, "-m", "pytest", "--quiet", "--numprocesses=2"]
    shown = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120).stdout
    assert "test_18.py::test_one[1] - worker" in shown, shown
    assert "1 failed, 82 passed in" in shown, shown
