"""The sick runs of docs/reading-a-run.md print the warnings that the page shows, in fewer iterations."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reading-a-run.md"
RUNS = re.findall(r"```bash\nmegarl train (.+)\n```\n\n!\[.+\n\n```\n(warning: [^`]+)\n```", PAGE.read_text())
FEWER = "train.num_iterations=4 train.eval_every=4 train.num_eval_prompts=8 checkpoint.save_every=null"


def mask(text: str) -> str:
    """The numbers depend on the machine's rounding."""
    return re.sub(r"\d[\d.]*", "N", " ".join(text.split()))


@pytest.mark.parametrize("together", [RUNS[:1], RUNS[1:]], ids=["rate", "cut, critic"])
def test_a_sick_run_prints_its_warning_and_one_in_two_ways_both(short_path: Path, together: list) -> None:
    assert len(RUNS) == 3
    words = [*(word for arguments, _ in together for word in shlex.split(arguments)), *FEWER.split()]
    words = list({word.split("=")[0]: word for word in words}.values())  # of a key given twice the last
    command = [sys.executable, "-m", "megarl.cli", "train", *words, "hydra.run.dir=run"]
    done = subprocess.run(command, cwd=short_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    log = mask((short_path / "run" / "train.log").read_text())
    for _, warning in together:
        assert mask(warning.strip().removesuffix("...")) in log
