"""A sweep from its command line to its exit code."""

import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from megarl.config.errors import ConfigError
from megarl.report.record import State, format_outcomes, load_sweep
from megarl.run.command import end_with_config_error
from megarl.run.process import Stopped, stopping_on_signals
from megarl.run.resume import quote
from megarl.sweep.slurm import RefusedError, check_notice, list_live_jobs, submitting, wait_for_live_jobs

SWEEP_DIR = "hydra.sweep.dir="
EXIT_FAILED = 1
OPTUNA = {
    "hydra.sweeper.direction": "maximize",
    "hydra.sweeper.n_jobs": "1",
    "hydra.sweeper.max_failure_rate": "1.0",
    "hydra.sweeper.sampler.seed": "1",
}
"""Defaults with hydra/sweeper=optuna. The objective is the held-out reward. A sampler with a seed proposes the same
runs when the sweep is started again, which skips those that are done."""
LOCAL = {"hydra.launcher.timeout_min": "14400"}
"""Defaults with hydra/launcher=submitit_local, which would end every run after an hour"""
ON_SLURM = "hydra/launcher=slurm"
NODES, NODES_OF_JOB = "hydra.launcher.nodes=", "hydra.launcher.additional_parameters.nodes="
"""submitit waits for a result from every node it knows of; with hydra/launcher=slurm only the first node gives one"""
NO_SEED = "hydra/sweeper/sampler=grid"


def run_sweep(start: Callable[[], object]) -> int:
    """Have Hydra start every run of sys.argv, then print how each ended. Returns the exit code.

    start: Hydra's entry point. The code is 0 where every run in SWEEP_DIR is done, else 1; 128 + number for a signal.
    """
    try:
        sys.argv[1:], sweep_dir = complete_arguments(sys.argv[1:])
    except ConfigError as error:
        end_with_config_error(error)
    code = 0
    try:
        with stopping_on_signals():
            start_runs(start, sweep_dir)
    except ConfigError as error:
        end_with_config_error(error)
    except RefusedError as refused:
        end_with_config_error(ConfigError([str(refused)]))
    except Stopped as stopped:
        print(f"{stopped}; {describe_left(sweep_dir)}", file=sys.stderr)
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


def start_runs(start: Callable[[], object], sweep_dir: Path) -> None:
    if ON_SLURM not in sys.argv[1:]:
        start()
        return
    check_notice([text for text in sys.argv[1:] if not text.startswith("-")])
    with submitting(sweep_dir):
        wait_for_live_jobs(sweep_dir)
        start()


def describe_left(sweep_dir: Path) -> str:
    """What the sweep's runs do after a signal: jobs on Slurm stay."""
    if ON_SLURM not in sys.argv[1:]:
        return "every process was ended"
    try:
        live = list_live_jobs(sweep_dir)
    except RefusedError as refused:
        return f"its jobs were left as they are, and which live is not known: {refused}"
    if not live:
        return "no job of the sweep is live"
    ids = " ".join(sorted({name.split("_")[0] for name in live}))
    return (
        f"its jobs were left as they are: {' '.join(live)}; `scancel {ids}` ends them, the same command waits for them"
    )


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
    fixed = [
        key for key, override in values.items() if not key.startswith("hydra") and not override.is_sweep_override()
    ]
    completed = [text for text in arguments if not text.lstrip("+").startswith(SWEEP_DIR)]
    completed.append(f"{SWEEP_DIR}{quote(sweep_dir)}")
    if ON_SLURM in arguments:
        completed = [text.replace(NODES, NODES_OF_JOB) if text.startswith(NODES) else text for text in completed]
    if fixed:
        completed.append(f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]")
    defaults = OPTUNA if "hydra/sweeper=optuna" in arguments else {}
    defaults = defaults | (LOCAL if "hydra/launcher=submitit_local" in arguments else {})
    completed += [
        f"{key}={value}"
        for key, value in defaults.items()
        if key not in values and not (key.endswith(".seed") and NO_SEED in arguments)
    ]
    return completed, sweep_dir
