"""One run of a sweep, in a process of its own: skipped where it is done, resumed where it has begun.

Hydra's launchers call it: one run after the other here, or as jobs. It does not raise for a run that fails: the sweep
continues, and the run's folder has the reason (outcome.json).
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from megarl.checkpoint.folder import RUN_FILE
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema.root import Config
from megarl.report.record import Outcome, State, load_outcome
from megarl.run.command import Results, format_results, list_overrides
from megarl.run.ended import write_if_ours
from megarl.run.resume import quote
from megarl.sweep.process import LOG, explain_exit, run_process

SLURM_SCRIPT = (Path(__file__).resolve().parents[1] / "slurm").resolve() / "train.sh"
END_MARGIN_S = 60.0
"""Time for the processes of a run to end, beyond its own deadlines"""
HOME_VARIABLE = "MEGARL_HOME"
"""Environment variable: the repository's folder, for slurm/train.sh"""


def run_one() -> Results | None:
    """The composed run's results; None where it failed. Raises Stopped for a signal, once the run has ended."""
    hydra = HydraConfig.get()
    run_dir = Path(hydra.runtime.output_dir)
    known = read_outcome(run_dir)
    if known is not None and known.state is State.done:
        _say(f"{run_dir.name}: already done: {format_results(known.results)}")
        return known.results
    overrides = list_overrides()
    try:
        config = load_config(overrides)
    except ConfigError as error:
        write_if_ours(run_dir, Outcome(State.failed, "; ".join(error.problems)))
        _say(f"{run_dir.name}: failed: {error}")
        return None
    runner = Runner(config, on_slurm=hydra.runtime.choices.get("hydra/launcher", "") == "slurm")
    arguments = resume_arguments(run_dir, config, overrides)
    if arguments is None:
        arguments = [*overrides, f"hydra.run.dir={quote(run_dir)}"]
    write_if_ours(run_dir, None)
    _say(f"{run_dir.name}: {'resumes' if arguments[0].startswith('resume=') else 'starts'}; {run_dir / LOG}")
    code = runner.run(arguments, run_dir)
    outcome = read_outcome(run_dir)
    if outcome is None or (code != 0 and outcome.state is State.done):
        outcome = Outcome(State.failed, explain_exit(code, run_dir / LOG))
        if not write_if_ours(run_dir, outcome):
            _say(f"{run_dir.name}: another process runs it; its outcome is that one's to write")
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

    def run(self, arguments: Sequence[str], folder: Path) -> int:
        """Run `python -m megarl.train` with these arguments; returns the exit code.

        Signals are passed on: train.sh queues the job again after SIGUSR1, which Slurm sends before the time limit.
        """
        command = [sys.executable, "-m", "megarl.train", *arguments]
        if self.on_slurm:
            home = f"{HOME_VARIABLE}={SLURM_SCRIPT.parents[1]}"
            command = ["env", home, "bash", str(SLURM_SCRIPT), "--command=train", *arguments]
        return run_process(command, folder / LOG, self.stop_deadline_s)


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
