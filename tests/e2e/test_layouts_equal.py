"""The command tools/check_layouts.py: real updates under every layout of two processes, and its exit codes.

Four processes: tests/parallel/test_equal_layouts.py, the same comparison.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def run_tool(*arguments: str) -> tuple[int, list[str], str]:
    command = [sys.executable, str(ROOT / "tools" / "check_layouts.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT)
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_policy_and_critic_compute_the_same_under_every_layout_of_two_processes() -> None:
    overrides = ("model=tiny", "model.random.num_layers=4", "algo.value_clip=0.2", "algo.entropy_coef=0.01")
    code, lines, errors = run_tool("--processes", "2", "--rows", "8", *overrides)
    assert code == 0, "\n".join([*lines, errors])
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith(("| policy", "| critic"))]
    layouts = {"one", "one-small-microbatches", "dp2", "cp2", "pp2", "pp2-vpp2", "tp2", "tp2-sp"}
    found = {(row[0], row[1]) for row in rows}
    assert found == {(role, name) for role in ("policy", "critic") for name in layouts}
    assert len(rows) == 16
    assert all(row[-1] == "equal" for row in rows)
    assert all(float(row[4]) > 0 for row in rows), "a gradient that is zero everywhere is equal to anything"
    assert lines[-1] == "equal: all 16 compute what one process computes"


def test_a_wrong_key_ends_it_with_code_2_before_anything_starts() -> None:
    code, lines, errors = run_tool("model=tiny", "algo.clip_hgh=0.3")
    assert (code, lines) == (2, [])
    assert "algo.clip_hgh" in errors
