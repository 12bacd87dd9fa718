"""A sweep's jobs on Slurm.

They are submitted by hydra-submitit-launcher, and SWEEP_DIR/.jobs.jsonl has their ids: the same command again waits for
those that are still in the queue.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from megarl.config.errors import ConfigError
from megarl.config.schema.root import register
from megarl.config.search_path import CONF_DIR

JOBS = ".jobs.jsonl"
ASK_S, POLL_S, NUM_TRIES = 30.0, 5.0, 20
"""How long squeue may take, how long to wait before it is asked again, and how often where it fails"""
OF_THE_PLUGIN = ("_target_", "submitit_folder")


class RefusedError(BaseException):
    """sbatch has refused a job. Not an Exception: Hydra would end the process with a traceback of it."""

    def __init__(self, said: str, submitted: Sequence[str]):
        """said: the output of sbatch. submitted: ids of the jobs that it accepted before."""
        lines = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in said.splitlines()]
        super().__init__(f"hydra.launcher: sbatch: {'; '.join(filter(None, lines)) or 'failed without a message'}")
        if submitted:
            self.args = (f"{self}; submitted before: `scancel {' '.join(submitted)}` cancels them",)


@contextlib.contextmanager
def submitting(sweep_dir: Path) -> Iterator[None]:
    """Within the block each submitted job is written to JOBS, and one that sbatch refuses raises RefusedError.

    Jobs handle their signals themselves. Raises ConfigError where there is no sbatch.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    missing = [name for name in ("sbatch", "srun") if shutil.which(name) is None]
    if missing:
        raise ConfigError(
            [f"hydra/launcher: slurm needs {' and '.join(missing)}, not found here; login nodes have them"]
        )
    submit, write = SlurmExecutor._submit_command, SlurmExecutor._make_submission_file_text
    submitted: list[str] = []

    def submit_or_tell(executor: Any, command: str) -> Any:
        try:
            job = submit(executor, command)
        except (FailedJobError, FailedSubmissionError) as error:
            raise RefusedError(str(error), submitted) from error
        submitted.append(job.job_id)
        with (sweep_dir / JOBS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"job": job.job_id}) + "\n")
        return job

    def write_with_exec(executor: Any, command: str, uid: str) -> str:
        # SIGUSR1 would end the shell of the batch script, and with it the run; Python has no handler while it starts.
        return write(executor, command, uid).replace(f"\n{command}\n", f"\ntrap '' USR1\nexec {command}\n")

    sweep_dir.mkdir(parents=True, exist_ok=True)
    SlurmExecutor._submit_command = submit_or_tell  # type: ignore[method-assign, assignment]
    SlurmExecutor._make_submission_file_text = write_with_exec  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        SlurmExecutor._submit_command = submit  # type: ignore[method-assign]
        SlurmExecutor._make_submission_file_text = write  # type: ignore[method-assign]


def list_live_jobs(sweep_dir: Path) -> list[str]:
    """The sweep's jobs that wait, run or are about to end, as squeue names them (1207_3, 1207_[4-7]).

    Raises RefusedError where Slurm does not answer.
    """
    path = sweep_dir / JOBS
    if not path.is_file():
        return []
    # A job array by its first part, as sbatch has named it.
    known = {json.loads(line)["job"] for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")}
    command = ["squeue", "--noheader", "--format=%F %i", f"--user={os.getuid()}"]
    for _ in range(NUM_TRIES):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
        except (OSError, subprocess.SubprocessError):
            time.sleep(POLL_S)
            continue
        pairs = [line.split() for line in done.stdout.splitlines()]
        return sorted(name for first, name in pairs if first in known)
    raise RefusedError(f"squeue does not say, after {NUM_TRIES} tries, which jobs of {path} are live", [])


def wait_for_live_jobs(sweep_dir: Path) -> None:
    """Until none of the sweep's jobs is in the queue, however long; a second one would run beside it."""
    before: list[str] = []
    while live := list_live_jobs(sweep_dir):
        if live != before:
            print(
                f"waiting for jobs of this sweep that are live: {' '.join(live)}; then come those missing", flush=True
            )
        before = live
        time.sleep(POLL_S)


def check_notice(overrides: Sequence[str]) -> None:
    """Raises ConfigError where Slurm's signal would come in the first half of a job's time."""
    launcher = compose_launcher(overrides)
    found = re.search(r"@(\d+)$", str(launcher.get("additional_parameters", {}).get("signal", "")))
    limit_s = 60 * int(launcher.get("timeout_min") or 0)
    if found and limit_s and int(found[1]) > limit_s / 2:
        raise ConfigError(
            [
                f"hydra.launcher.timeout_min: found {limit_s // 60}; SIGUSR1 comes {found[1]} s before the limit, which"
                f" leaves less than half of it to train: at least {-(-int(found[1]) // 30)}, or"
                " ++hydra.launcher.additional_parameters.signal=B:USR1@SECONDS"
            ]
        )


def compose_launcher(overrides: Sequence[str]) -> dict[str, Any]:
    """The parameters that Hydra's launcher will use, without its own folder."""
    register()
    given = [
        text
        for text in overrides
        if text.lstrip("+~").startswith(("hydra/launcher=", "hydra.launcher.", "hydra.searchpath="))
    ]
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        launcher = compose("config", overrides=given, return_hydra_config=True).hydra.launcher
    OmegaConf.set_readonly(launcher, False)
    launcher.submitit_folder = ""
    container = OmegaConf.to_container(launcher, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items() if key not in OF_THE_PLUGIN}
