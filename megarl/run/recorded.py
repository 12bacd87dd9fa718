"""A training run that leaves in its folder how it was started (run.json) and how it ended (outcome.json)."""

import traceback
from collections.abc import Sequence
from pathlib import Path

from megarl.checkpoint.folder import RUN_FILE
from megarl.checkpoint.manifest import CheckpointError
from megarl.config.errors import ConfigError
from megarl.config.schema.root import Config
from megarl.cpu.threads import settle_threads
from megarl.report.record import Outcome, State, clear_outcome, write_outcome
from megarl.report.terminal import LOG_NAME, append_log
from megarl.run.attempts import run_job
from megarl.run.command import format_results
from megarl.run.limits import format_limit
from megarl.run.resume import check_changes, load_run, save_run
from megarl.run.signals import Stopped
from megarl.trainer import Summary

HELDOUT = "reward/heldout"


def run_recorded(
    config: Config, run_dir: Path, overrides: Sequence[str] = (), *, is_resumed: bool | None = None
) -> Summary:
    """Train as `run_job` does, and raise what it raises.

    overrides: what resume=`run_dir` is to repeat. is_resumed: whether `run_dir` holds the run that goes on; None: it
    does if it has a run.json. Raises ConfigError where the configuration differs from that run's in what is learned.
    """
    if is_resumed is None:
        is_resumed = (run_dir / RUN_FILE).is_file()
    before = load_run(run_dir)["config"] if is_resumed else {}
    problems = check_changes(before, config) if is_resumed else []
    if problems:
        raise ConfigError(problems)
    # run.json has the numbers themselves.
    config = settle_threads(config, recorded=before)
    is_begun = False

    def note_start() -> None:
        nonlocal is_begun
        save_run(run_dir, config, overrides)
        clear_outcome(run_dir)
        is_begun = True

    try:
        summary = run_job(config, run_dir, is_new=not is_resumed, note_start=note_start)
    except BaseException as error:
        # Before its start the folder may be another run's, and a refused configuration is no run.
        if is_begun or not (isinstance(error, ConfigError) or (run_dir / RUN_FILE).exists()):
            plain = isinstance(error, Stopped | ConfigError | CheckpointError)
            why = str(error) if plain else f"{type(error).__name__}: {error}"
            # Of a stop and of bad input the code's place says nothing.
            lines = traceback.format_exception_only(error) if plain else traceback.format_exception(error)
            append_log(run_dir / LOG_NAME, "".join(lines).rstrip())
            write_outcome(run_dir, Outcome(State.stopped if isinstance(error, Stopped) else State.failed, why))
        raise
    results = {"iterations": summary.num_iterations, HELDOUT: summary.heldout_reward}
    limit, total = summary.limit, config.train.num_iterations
    why = "" if limit is None else format_limit(limit, summary.num_iterations, total)
    write_outcome(run_dir, Outcome(State.done, why, results))
    append_log(run_dir / LOG_NAME, f"done: {format_results(results)}")
    return summary
