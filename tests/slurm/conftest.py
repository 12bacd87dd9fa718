"""A real Slurm of two nodes on this machine, for the session, and jobs in it."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from mini_slurm import MiniSlurm, find_missing, running_slurm
from slurm_job import Job

TRAIN = Path(__file__).resolve().parents[2] / "slurm" / "train.sh"
SHARED_NODE = ("--oversubscribe", "--cpus-per-task=2", "--mem=1000")
"""Instead of whole nodes, so that two jobs have room at once"""


@pytest.fixture(scope="session")
def slurm() -> Iterator[MiniSlurm]:
    missing = find_missing()
    if missing:
        pytest.skip(f"the tests with a real Slurm were not run: {', '.join(missing)} missing (apt: slurm-wlm munge)")
    # Short, and open to this user alone.
    root = Path(tempfile.mkdtemp(prefix="mini-slurm-", dir="/tmp"))
    try:
        with running_slurm(root) as running:
            yield running
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def submit(slurm: MiniSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`sbatch OPTIONS slurm/train.sh OVERRIDES`; whatever the test leaves of its jobs is cancelled."""
    monkeypatch.setenv("MEGARL_PYTHON", sys.executable)
    jobs: list[Job] = []

    def send(*overrides: str, options: tuple[str, ...] = ()) -> Job:
        done = slurm.call("sbatch", "--parsable", f"--chdir={tmp_path}", *SHARED_NODE, *options, str(TRAIN), *overrides)
        jobs.append(Job(slurm, done.stdout.strip(), tmp_path))
        return jobs[-1]

    yield send
    for job in jobs:
        slurm.call("scancel", job.number, check=False)
    for job in jobs:
        job.expect_nothing_left()
