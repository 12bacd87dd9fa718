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


def run_tests(directory: Path, *sources: str) -> str:
    """What pytest prints of these files with the conftest.py of here."""
    tests = directory / "tests"
    tests.mkdir()
    (directory / "pytest.ini").touch()
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tests)
    for number, source in enumerate(sources):
        (tests / f"test_{number}.py").write_text(source)
    words = [sys.executable, "-m", "pytest", "--quiet", "--numprocesses=2"]
    return subprocess.run(words, cwd=directory, capture_output=True, text=True, timeout=120).stdout


def test_a_worker_that_dies_fails_one_test_and_all_others_are_run(tmp_path: Path) -> None:
    shown = run_tests(tmp_path, *(DIES.format(file=file) for file in range(20)))
    assert "1 failed, 80 passed in" in shown, shown
    assert "crashed while running 'tests/test_18.py::test_one[1]'" in shown


def test_a_changed_signal_handler_is_that_of_before_in_the_next_test(tmp_path: Path) -> None:
    shown = run_tests(tmp_path, CHANGES)
    assert "2 passed in" in shown, shown
