"""One run of a sweep, in a process of its own: skipped where it is done, resumed where it has begun.

Hydra's launchers call it: one run after the other here, or as jobs. It does not raise for a run that fails: the sweep
continues, and the run's folder has the reason (outcome.json).
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from megarl.checkpoint.folder import RUN_FILE
from megarl.config.errors import ConfigError
from megarl.config.load import to_config
from megarl.config.schema.root import Config
from megarl.report.outcome import Outcome, State, clear_outcome, load_outcome, write_outcome
from megarl.run.command import Results, format_results, list_overrides
from megarl.run.resume import quote
from megarl.sweep.process import LOG, explain_exit, run_process
from megarl.sweep.sharing import OTHERS_DEADLINE_S, share_pretraining

SLURM_SCRIPT = (Path(__file__).resolve().parents[1] / "slurm").resolve() / "train.sh"
NOTICE_S = 600.0
"""How long before the time limit a run is asked to save, as in slurm/train.sh"""
ASK_S = 30.0
"""How long Slurm may take to answer"""
END_MARGIN_S = 60.0
"""Time for the processes of a run to end, beyond its own deadlines"""
TRAIN, PRETRAIN = "megarl.train", "megarl.pretrain_value"
MODULE_VARIABLE = "MEGARL_MODULE"
"""Environment variable: the module that slurm/train.sh runs, if not megarl.train"""
HOME_VARIABLE = "MEGARL_HOME"
"""Environment variable: the repository's folder, for slurm/train.sh"""


def run_one(composed: DictConfig) -> Results | None:
    """The composed run's results; None where it failed. Raises Stopped for a signal, once the run has ended."""
    hydra = HydraConfig.get()
    run_dir, sweep_dir = Path(hydra.runtime.output_dir), Path(hydra.sweep.dir).resolve()
    known = read_outcome(run_dir)
    if known is not None and known.state is State.done:
        _say(f"{run_dir.name}: already done: {format_results(known.results)}")
        return known.results
    try:
        config = to_config(composed)
    except ConfigError as error:
        write_outcome(run_dir, Outcome(State.failed, "; ".join(error.problems)))
        _say(f"{run_dir.name}: failed: {error}")
        return None
    runner = Runner(config, on_slurm=hydra.runtime.choices.get("hydra/launcher", "") == "slurm")
    overrides = list_overrides()
    arguments = resume_arguments(run_dir, config, overrides)
    if arguments is None:
        taken = share_pretraining(config, overrides, sweep_dir, runner.pretrain, _say, wait_s=runner.wait_s)
        arguments = [*overrides, f"hydra.run.dir={quote(run_dir)}"]
        arguments += [f"++algo.value_pretrain.taken_from={quote(taken)}"] if taken else []
    clear_outcome(run_dir)
    _say(f"{run_dir.name}: {'resumes' if arguments[0].startswith('resume=') else 'starts'}; {run_dir / LOG}")
    code = runner.run(TRAIN, arguments, run_dir)
    outcome = read_outcome(run_dir)
    if outcome is None or (code != 0 and outcome.state is State.done):
        outcome = Outcome(State.failed, explain_exit(code, run_dir / LOG))
        write_outcome(run_dir, outcome)
    text = format_results(outcome.results) if outcome.state is State.done else outcome.why
    _say(f"{run_dir.name}: {outcome.state.value}: {text}")
    return outcome.results if outcome.state is State.done else None


class Runner:
    """Starts the commands of a sweep's runs: here, or within a Slurm allocation."""

    def __init__(self, config: Config, on_slurm: bool):
        self.on_slurm = on_slurm
        cluster = config.cluster
        # Time to finish the current update, write a checkpoint and end the processes.
        self.stop_deadline_s = (
            cluster.call_deadline_s + config.checkpoint.stop_deadline_s + cluster.shutdown_deadline_s + END_MARGIN_S
        )

    @property
    def wait_s(self) -> float:
        """How long to wait for another run's value pretraining: not at all on Slurm, where it is a job of its own."""
        return 0.0 if self.on_slurm else OTHERS_DEADLINE_S

    def run(self, module: str, arguments: Sequence[str], folder: Path) -> int:
        """Run the module with these arguments; returns the exit code."""
        command = [sys.executable, "-m", module, *arguments]
        if self.on_slurm:
            settings = [f"{MODULE_VARIABLE}={module}", f"{HOME_VARIABLE}={SLURM_SCRIPT.parents[1]}"]
            command = ["env", *settings, "bash", str(SLURM_SCRIPT), *arguments]
        return run_process(command, folder / LOG, self.stop_deadline_s, self.find_end())

    def find_end(self) -> float | None:
        """When (Unix time) a run is asked to save, before its allocation's time limit; None: there is no limit."""
        limit = find_time_limit(os.environ["SLURM_JOB_ID"]) if self.on_slurm else None
        return limit - NOTICE_S if limit is not None else None

    def pretrain(self, overrides: Sequence[str], folder: Path) -> str | None:
        """Run value pretraining; returns why it failed, None where it succeeded."""
        code = self.run(PRETRAIN, [*overrides, f"hydra.run.dir={quote(folder)}"], folder)
        return explain_exit(code, folder / LOG) if code else None


def find_time_limit(job: str) -> float | None:
    """When (Unix time) Slurm ends the job; None where it has no limit, or Slurm does not answer."""
    command = ["scontrol", "show", "job", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r" EndTime=(\d{4}-\d\d-\d\dT[\d:]+)", done.stdout)
    return datetime.fromisoformat(found[1]).timestamp() if found else None


def resume_arguments(run_dir: Path, config: Config, overrides: Sequence[str]) -> list[str] | None:
    """The arguments that resume a run; None for one that has not begun.

    A run without checkpoints cannot be resumed: its folder is renamed to NAME.aside-1.
    """
    if not (run_dir / RUN_FILE).is_file():
        return None
    if config.checkpoint.save_every is not None:
        return [f"resume={run_dir}", *overrides]
    number = next(n for n in range(1, 10_000) if not run_dir.with_name(f"{run_dir.name}.aside-{n}").exists())
    run_dir.rename(run_dir.with_name(f"{run_dir.name}.aside-{number}"))
    return None


def read_outcome(run_dir: Path) -> Outcome | None:
    """The run's outcome; None where there is none or it is damaged: the run then resumes from its checkpoint."""
    try:
        return load_outcome(run_dir)
    except ValueError as error:
        _say(str(error))
        return None


def _say(text: str) -> None:
    print(text, flush=True)
