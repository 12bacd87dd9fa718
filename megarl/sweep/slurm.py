"""Value pretraining of a sweep on Slurm: jobs of their own, on which the runs' jobs depend.

They are submitted like the runs, with the parameters of hydra-submitit-launcher. A run whose value pretraining has
failed does its own.
"""

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from megarl.config.errors import ConfigError
from megarl.config.load import expand_sweep, load_config
from megarl.config.schema.root import register
from megarl.config.search_path import CONF_DIR
from megarl.sweep.run import Runner
from megarl.sweep.sharing import find_folder, is_complete, share_pretraining

DEPENDENCY = "++hydra.launcher.additional_parameters.dependency="
OF_THE_PLUGIN = ("_target_", "submitit_folder")
OF_ALL_EXECUTORS = ("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes", "name")
"""Parameters that submitit takes without the executor's name as a prefix"""


class RefusedError(BaseException):
    """sbatch has refused a job. Not an Exception: Hydra would end the process with a traceback of it."""

    def __init__(self, said: str, submitted: Sequence[str]):
        """said: the output of sbatch. submitted: ids of the jobs that it accepted before."""
        lines = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in said.splitlines()]
        super().__init__(f"hydra.launcher: sbatch: {'; '.join(filter(None, lines)) or 'failed without a message'}")
        if submitted:
            self.args = (f"{self}; submitted before: `scancel {' '.join(submitted)}` cancels them",)


@contextlib.contextmanager
def raise_on_refusal() -> Iterator[None]:
    """Within the block a job that sbatch refuses raises RefusedError. Raises ConfigError where there is no sbatch."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    missing = [name for name in ("sbatch", "srun") if shutil.which(name) is None]
    if missing:
        raise ConfigError(
            [f"hydra/launcher: slurm needs {' and '.join(missing)}, not found here; login nodes have them"]
        )
    submit = SlurmExecutor._submit_command
    submitted: list[str] = []

    def submit_or_tell(executor: Any, command: str) -> Any:
        try:
            job = submit(executor, command)
        except (FailedJobError, FailedSubmissionError) as error:
            raise RefusedError(str(error), submitted) from error
        submitted.append(job.job_id)
        return job

    SlurmExecutor._submit_command = submit_or_tell  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        SlurmExecutor._submit_command = submit  # type: ignore[method-assign]


def submit_pretrainings(arguments: Sequence[str], sweep_dir: Path) -> list[str]:
    """Submit the missing value pretrainings of this command line's runs; returns the override that makes runs wait."""
    overrides = [text for text in arguments if not text.startswith("-")]
    missing: dict[Path, list[str]] = {}
    for run in expand_sweep(overrides):
        folder = find_folder(load_config(run), sweep_dir)
        if folder is not None and not is_complete(folder):
            missing.setdefault(folder, run)
    if not missing:
        return []
    executor = build_executor(overrides, sweep_dir)
    jobs = {folder: executor.submit(pretrain_in_job, run, sweep_dir) for folder, run in missing.items()}
    for folder, job in jobs.items():
        print(f"{folder.name}: value pretraining, job {job.job_id}; the runs that share it start after it", flush=True)
    # afterany: with afterok a failed job would leave the runs in the queue forever.
    return [f"{DEPENDENCY}'afterany:{':'.join(job.job_id for job in jobs.values())}'"]


def pretrain_in_job(overrides: Sequence[str], sweep_dir: Path) -> None:
    """The function that the job runs."""
    config = load_config(overrides)
    runner = Runner(config, on_slurm=True)
    share_pretraining(config, overrides, sweep_dir, runner.pretrain, lambda text: print(text, flush=True))


def build_executor(overrides: Sequence[str], sweep_dir: Path) -> Any:
    """submitit's executor, with the parameters that Hydra's launcher will use."""
    import submitit

    register()
    given = [
        text
        for text in overrides
        if text.lstrip("+~").startswith(("hydra/launcher=", "hydra.launcher.", "hydra.searchpath="))
    ]
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        launcher = compose("config", overrides=given, return_hydra_config=True).hydra.launcher
    OmegaConf.set_readonly(launcher, False)
    launcher.submitit_folder = str(sweep_dir / ".submitit" / "%j")
    container = OmegaConf.to_container(launcher, resolve=True)
    assert isinstance(container, dict)
    values = {str(key): value for key, value in container.items()}
    executor = submitit.AutoExecutor(folder=values["submitit_folder"], cluster="slurm")
    executor.update_parameters(
        **{
            key if key in OF_ALL_EXECUTORS or key == "stderr_to_stdout" else f"slurm_{key}": value
            for key, value in values.items()
            if key not in OF_THE_PLUGIN and value is not None
        }
    )
    return executor
