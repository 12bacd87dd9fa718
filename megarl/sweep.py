"""Runs of a sweep (-m), each a process of its own, here or in a Slurm array. The same command runs what is missing."""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema.root import Config
from megarl.files import RUN_FILE
from megarl.report.record import Outcome, State, format_outcomes, load_outcome, load_sweep
from megarl.run.command import Results, end_with_config_error, format_results, list_overrides, quote, write_if_ours
from megarl.signals import PR_SET_PDEATHSIG, Stopped, stopping_on_signals

OUTPUT = "output.log"
LONGEST_TAIL = 20_000
_libc = ctypes.CDLL(None)
_say = partial(print, flush=True)


def run_process(command: Sequence[str], log: Path, stop_deadline_s: float) -> int:
    """Run the command to its end and append its output to `log`. Returns its exit code, -N where signal N killed it.

    A signal that asks this process to end is passed on; Stopped is raised once the command has ended, for which it is
    killed after `stop_deadline_s`. If this process dies, the command gets SIGTERM.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output, stopping_on_signals():
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        try:
            return child.wait()
        except BaseException as error:
            number = error.number if isinstance(error, Stopped) else signal.SIGTERM
            # A terminal's Ctrl-C has reached it already; it handles the first signal only.
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)
            try:
                child.wait(stop_deadline_s)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            raise


def explain_exit(code: int, log: Path) -> str:
    """Why a command failed, in one line: its exit code or signal, and its last lines of output."""
    ended = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
    text = log.read_text(encoding="utf-8", errors="replace")[-LONGEST_TAIL:] if log.is_file() else ""
    said = [line.strip() for line in text.splitlines() if line.strip() and "HYDRA_FULL_ERROR" not in line]
    errors = list(takewhile(lambda line: line.startswith("error: "), reversed(said)))
    words = [line.removeprefix("error: ") for line in reversed(errors)] or said[-1:] or ["it printed nothing"]
    return f"{ended}: {'; '.join(words)}"


# One run of a sweep, in a process of its own: skipped where it is done, resumed where it has begun.
#
# Hydra's launchers call it: one run after the other here, or as jobs. It does not raise for a run that fails: the sweep
# continues, and the run's folder has the reason (run.json).

SLURM_SCRIPT = (Path(__file__).resolve().parent / "slurm").resolve() / "train.sh"
END_MARGIN_S = 60.0
"""Time for the processes of a run to end, beyond its own deadlines"""


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
    write_if_ours(run_dir, None)
    arguments = resume_arguments(run_dir, config, overrides)
    _say(f"{run_dir.name}: {'resumes' if arguments[0].startswith('resume=') else 'starts'}; {run_dir / OUTPUT}")
    code = run_command(arguments, run_dir, config, on_slurm=hydra.runtime.choices.get("hydra/launcher") == "slurm")
    outcome = read_outcome(run_dir)
    if outcome is None or (code != 0 and outcome.state is State.done):
        outcome = Outcome(State.failed, explain_exit(code, run_dir / OUTPUT))
        if not write_if_ours(run_dir, outcome):
            _say(f"{run_dir.name}: another process runs it; its outcome is that one's to write")
    is_done = outcome.state is State.done
    _say(f"{run_dir.name}: {outcome.state.value}: {format_results(outcome.results) if is_done else outcome.why}")
    return outcome.results if is_done else None


def run_command(arguments: Sequence[str], folder: Path, config: Config, *, on_slurm: bool) -> int:
    """Run `python -m megarl.train` with these arguments, here or within a Slurm allocation; returns the exit code.

    Signals are passed on: train.sh queues the job again after SIGUSR1, which Slurm sends before the time limit.
    """
    command = [sys.executable, "-m", "megarl.train", *arguments]
    if on_slurm:
        home = f"MEGARL_HOME={SLURM_SCRIPT.parents[1]}"
        command = ["env", home, "bash", str(SLURM_SCRIPT), "--command=train", *arguments]
    # Time to finish the current update, write a checkpoint and end the processes.
    cluster = config.cluster
    stop_s = cluster.call_deadline_s + config.checkpoint.stop_deadline_s + cluster.shutdown_deadline_s + END_MARGIN_S
    return run_process(command, folder / OUTPUT, stop_s)


def resume_arguments(run_dir: Path, config: Config, overrides: Sequence[str]) -> list[str]:
    """The arguments that resume a run, or start one that has not begun.

    A run without checkpoints cannot be resumed: its folder is renamed to NAME.aside-1.
    """
    if (run_dir / RUN_FILE).is_file():
        if config.checkpoint.save_every is not None:
            return [f"resume={run_dir}", *overrides]
        number = next(n for n in range(1, 10_000) if not run_dir.with_name(f"{run_dir.name}.aside-{n}").exists())
        run_dir.rename(run_dir.with_name(f"{run_dir.name}.aside-{number}"))
    return [*overrides, f"hydra.run.dir={quote(run_dir)}"]


def read_outcome(run_dir: Path) -> Outcome | None:
    """The run's outcome; None where there is none or it is damaged: the run then resumes from its checkpoint."""
    try:
        return load_outcome(run_dir)
    except ValueError as error:
        _say(str(error))
        return None


# A sweep's jobs on Slurm.
#
# They are submitted by hydra-submitit-launcher, and SWEEP_DIR/.jobs.jsonl has their ids: the same command again waits
# for those that are still in the queue.

JOBS = ".jobs.jsonl"
ASK_S, POLL_S, NUM_TRIES = 30.0, 5.0, 20
"""How long squeue may take, how long to wait before it is asked again, and how often where it fails"""


class RefusedError(BaseException):
    """sbatch has refused a job. Not an Exception: Hydra would end the process with a traceback of it."""


@contextlib.contextmanager
def submitting(sweep_dir: Path) -> Iterator[None]:
    """Within the block each submitted job is written to JOBS, and one that sbatch refuses raises RefusedError.

    Jobs handle their signals themselves. Raises ConfigError where there is no sbatch.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    if missing := [name for name in ("sbatch", "srun") if shutil.which(name) is None]:
        problem = f"slurm needs {' and '.join(missing)}, not found here; login nodes have them"
        raise ConfigError([f"hydra/launcher: {problem}"])
    submit, write = SlurmExecutor._submit_command, SlurmExecutor._make_submission_file_text

    def submit_or_tell(executor: Any, command: str) -> Any:
        try:
            job = submit(executor, command)
        except (FailedJobError, FailedSubmissionError) as error:
            lines = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in str(error).splitlines()]
            said = "; ".join(filter(None, lines)) or "failed without a message"
            raise RefusedError(f"hydra.launcher: sbatch: {said}") from error
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
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
            pairs = [line.split() for line in done.stdout.splitlines()]
            return sorted(name for first, name in pairs if first in known)
        time.sleep(POLL_S)
    raise RefusedError(f"squeue does not say, after {NUM_TRIES} tries, which jobs of {path} are live")


def wait_for_live_jobs(sweep_dir: Path) -> None:
    """Until none of the sweep's jobs is in the queue, however long; a second one would run beside it."""
    before: list[str] = []
    while live := list_live_jobs(sweep_dir):
        if live != before:
            _say(f"waiting for jobs of this sweep that are live: {' '.join(live)}; then come those missing")
        before = live
        time.sleep(POLL_S)


# A sweep from its command line to its exit code.

SWEEP_DIR = "hydra.sweep.dir="
EXIT_FAILED = 1
OPTUNA = {
    "hydra.sweeper.direction": "maximize",
    "hydra.sweeper.n_jobs": "1",
    "hydra.sweeper.max_failure_rate": "1.0",
    "hydra.sweeper.sampler.seed": "1",
}
"""Defaults with hydra/sweeper=optuna. A sampler with a seed proposes the same runs when the sweep is started again."""
ON_SLURM = "hydra/launcher=slurm"
NODES, NODES_OF_JOB = "hydra.launcher.nodes=", "hydra.launcher.additional_parameters.nodes="
"""submitit waits for a result from every node it knows of; with hydra/launcher=slurm only the first node gives one"""


def run_sweep(start: Callable[[], object]) -> int:
    """Have Hydra start every run of sys.argv, then print how each ended. Returns the exit code.

    start: Hydra's entry point. The code is 0 where every run in SWEEP_DIR is done, else 1; 128 + number for a signal.
    """
    try:
        sys.argv[1:], sweep_dir = complete_arguments(sys.argv[1:])
    except ConfigError as error:
        end_with_config_error(error)
    code, on_slurm = 0, ON_SLURM in sys.argv[1:]
    try:
        with stopping_on_signals(), contextlib.ExitStack() as stack:
            if on_slurm:
                stack.enter_context(submitting(sweep_dir))
                wait_for_live_jobs(sweep_dir)
            start()
    except (ConfigError, RefusedError) as error:
        end_with_config_error(error if isinstance(error, ConfigError) else ConfigError([str(error)]))
    except Stopped as stopped:
        left = describe_left(sweep_dir) if on_slurm else "every process was ended"
        print(f"{stopped}; {left}", file=sys.stderr)
        code = stopped.exit_code
    except SystemExit as end:
        # Hydra has printed the reason.
        code = end.code if isinstance(end.code, int) else EXIT_FAILED
    runs = load_sweep(sweep_dir)
    if not runs:
        return code
    missing = [run for run in runs if run.state != State.done.value]
    print(format_outcomes(runs))
    print(f"{len(runs) - len(missing)} of {len(runs)} runs done; sweep_dir={sweep_dir}")
    if missing or code:
        print(f"the same command with {SWEEP_DIR}{quote(sweep_dir)} runs those that are missing")
    return code or (EXIT_FAILED if missing else 0)


def describe_left(sweep_dir: Path) -> str:
    """What the sweep's jobs on Slurm do after a signal: they stay."""
    try:
        live = list_live_jobs(sweep_dir)
    except RefusedError as refused:
        return f"its jobs were left as they are, and which live is not known: {refused}"
    ids, names = " ".join(sorted({name.split("_")[0] for name in live})), " ".join(live)
    kept = f"its jobs were left as they are: {names}; `scancel {ids}` ends them, the same command waits for them"
    return kept if live else "no job of the sweep is live"


def complete_arguments(arguments: Sequence[str]) -> tuple[list[str], Path]:
    """The command line with the sweep's folder, the names of the runs' folders (by the swept keys), and OPTUNA."""
    if "hydra/launcher=submitit_slurm" in arguments:
        problem = f"would start the run once on every node; {ON_SLURM} is the same plugin, set up for slurm/train.sh"
        raise ConfigError([f"hydra/launcher: found submitit_slurm, which {problem}"])
    parser = OverridesParser.create()
    parsed = [parser.parse_override(text) for text in arguments if "=" in text and not text.startswith("-")]
    values = {override.get_key_element().lstrip("+"): override for override in parsed}
    given = values.get("hydra.sweep.dir")
    name = f"runs/sweep_{datetime.now():%Y-%m-%d_%H-%M-%S}"
    if given is not None:
        name = str(getattr(given.value(), "text", given.value()))
    sweep_dir = Path(name).expanduser().resolve()
    fixed = [key for key, one in values.items() if not key.startswith("hydra") and not one.is_sweep_override()]
    completed = [text for text in arguments if not text.lstrip("+").startswith(SWEEP_DIR)]
    completed.append(f"{SWEEP_DIR}{quote(sweep_dir)}")
    if ON_SLURM in arguments:
        completed = [text.replace(NODES, NODES_OF_JOB) if text.startswith(NODES) else text for text in completed]
    if fixed:
        completed.append(f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]")
    if "hydra/sweeper=optuna" in arguments:
        completed += [f"{key}={value}" for key, value in OPTUNA.items() if key not in values]
    return completed, sweep_dir
