"""One run of a sweep: skipped where it is done, gone on with where it has begun, in a process of its own.

Hydra's launchers call it, each in its own way: one after the other here, or as jobs. It does not raise for a run that
fails: the sweep goes on, and the run's folder says why (outcome.json).
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
"""Before the time limit, as in slurm/train.sh"""
ASK_S = 30.0
"""How long Slurm may take to answer"""
END_MARGIN_S = 60.0
"""Beyond its own deadlines, for the processes of a run to end"""
TRAIN, PRETRAIN = "megarl.train", "megarl.pretrain_value"
MODULE_VARIABLE = "MEGARL_MODULE"
"""Tells slurm/train.sh what to run, if not megarl.train"""
HOME_VARIABLE = "MEGARL_HOME"
"""Tells it where it is"""


def run_one(composed: DictConfig) -> Results | None:
    """The composed run's results; None where it failed. Raises Stopped for a signal, once the run has ended."""
    hydra = HydraConfig.get()
    run_dir, sweep_dir = Path(hydra.runtime.output_dir), Path(hydra.sweep.dir).resolve()
    known = read_outcome(run_dir)
    if known is not None and known.state is State.done:
        _say(f"{run_dir.name}: done before: {format_results(known.results)}")
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
    _say(f"{run_dir.name}: {'goes on' if arguments[0].startswith('resume=') else 'begins'}; {run_dir / LOG}")
    code = runner.run(TRAIN, arguments, run_dir)
    outcome = read_outcome(run_dir)
    if outcome is None or (code != 0 and outcome.state is State.done):
        outcome = Outcome(State.failed, explain_exit(code, run_dir / LOG))
        write_outcome(run_dir, outcome)
    text = format_results(outcome.results) if outcome.state is State.done else outcome.why
    _say(f"{run_dir.name}: {outcome.state.value}: {text}")
    return outcome.results if outcome.state is State.done else None


class Runner:
    """Starts commands as this sweep's launcher wants them started."""

    def __init__(self, config: Config, on_slurm: bool):
        self.on_slurm = on_slurm
        cluster = config.cluster
        # The update under way is finished, a checkpoint written, processes are ended.
        self.stop_deadline_s = (
            cluster.call_deadline_s + config.checkpoint.stop_deadline_s + cluster.shutdown_deadline_s + END_MARGIN_S
        )

    @property
    def wait_s(self) -> float:
        """An allocation does not wait for another's value pretraining: there it is a job that comes first."""
        return 0.0 if self.on_slurm else OTHERS_DEADLINE_S

    def run(self, module: str, arguments: Sequence[str], folder: Path) -> int:
        """The exit code."""
        command = [sys.executable, "-m", module, *arguments]
        if self.on_slurm:
            settings = [f"{MODULE_VARIABLE}={module}", f"{HOME_VARIABLE}={SLURM_SCRIPT.parents[1]}"]
            command = ["env", *settings, "bash", str(SLURM_SCRIPT), *arguments]
        return run_process(command, folder / LOG, self.stop_deadline_s, self.find_end())

    def find_end(self) -> float | None:
        """When (Unix time) to ask a run to save: before the time limit of its allocation."""
        limit = find_time_limit(os.environ["SLURM_JOB_ID"]) if self.on_slurm else None
        return limit - NOTICE_S if limit is not None else None

    def pretrain(self, overrides: Sequence[str], folder: Path) -> str | None:
        """Why value pretraining failed; None: it did not."""
        code = self.run(PRETRAIN, [*overrides, f"hydra.run.dir={quote(folder)}"], folder)
        return explain_exit(code, folder / LOG) if code else None


def find_time_limit(job: str) -> float | None:
    """When (Unix time) Slurm ends the job; None where it has no limit, or Slurm does not say."""
    command = ["scontrol", "show", "job", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r" EndTime=(\d{4}-\d\d-\d\dT[\d:]+)", done.stdout)
    return datetime.fromisoformat(found[1]).timestamp() if found else None


def resume_arguments(run_dir: Path, config: Config, overrides: Sequence[str]) -> list[str] | None:
    """How a run that has begun goes on; None for one that has not.

    One that was started without checkpoints cannot: what it has left is put aside, as NAME.aside-1.
    """
    if not (run_dir / RUN_FILE).is_file():
        return None
    if config.checkpoint.save_every is not None:
        return [f"resume={run_dir}", *overrides]
    number = next(n for n in range(1, 10_000) if not run_dir.with_name(f"{run_dir.name}.aside-{n}").exists())
    run_dir.rename(run_dir.with_name(f"{run_dir.name}.aside-{number}"))
    return None


def read_outcome(run_dir: Path) -> Outcome | None:
    """None too for one that is damaged: the run is then done again, from its checkpoint."""
    try:
        return load_outcome(run_dir)
    except ValueError as error:
        _say(str(error))
        return None


def _say(text: str) -> None:
    print(text, flush=True)
