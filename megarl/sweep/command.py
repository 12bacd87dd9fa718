"""A sweep from its command line to its exit code."""

import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from megarl.report.outcome import State
from megarl.report.sweep import format_outcomes, load_sweep
from megarl.resume import quote
from megarl.signals import Stopped, stopping_on_signals

SWEEP_DIR = "hydra.sweep.dir="
EXIT_FAILED = 1


def is_sweep(arguments: Sequence[str]) -> bool:
    return any(text in ("-m", "--multirun") for text in arguments)


def run_sweep(start: Callable[[], object]) -> int:
    """Have Hydra start every run of sys.argv; then print how each ended. Returns the exit code.

    start: Hydra's entry. The code is 0 where every run in SWEEP_DIR is done, else 1; 128 + its number for a signal.
    """
    sys.argv[1:], sweep_dir = complete_arguments(sys.argv[1:])
    code = 0
    try:
        with stopping_on_signals():
            start()
    except Stopped as stopped:
        print(f"{stopped}; the same command with {SWEEP_DIR}{sweep_dir} goes on", file=sys.stderr)
        code = stopped.exit_code
    except SystemExit as end:
        # Hydra has said why.
        code = end.code if isinstance(end.code, int) else EXIT_FAILED
    runs = load_sweep(sweep_dir).runs
    if not runs:
        return code
    print(format_outcomes(runs))
    failed = [run for run in runs if run.state != State.done.value]
    print(f"{len(runs) - len(failed)} of {len(runs)} runs done; sweep_dir={sweep_dir}")
    if failed:
        print(f"the same command with {SWEEP_DIR}{sweep_dir} does what is missing")
    return code or (EXIT_FAILED if failed else 0)


def complete_arguments(arguments: Sequence[str]) -> tuple[list[str], Path]:
    """The command line with the folder of the sweep in it, and with what names the runs' folders: the swept keys."""
    given = [text.removeprefix(SWEEP_DIR) for text in arguments if text.startswith(SWEEP_DIR)]
    name = given[-1].strip("'\"") if given else f"runs/sweep_{datetime.now():%Y-%m-%d_%H-%M-%S}"
    sweep_dir = Path(name).expanduser().resolve()
    fixed = []
    for text in arguments:
        if text.startswith(("-", "hydra")) or "=" not in text:
            continue
        override = OverridesParser.create().parse_override(text)
        if not override.is_sweep_override():
            fixed.append(override.key_or_group)
    rest = [text for text in arguments if not text.startswith(SWEEP_DIR)]
    names = ",".join(dict.fromkeys(fixed))
    return [
        *rest,
        f"{SWEEP_DIR}{quote(sweep_dir)}",
        *([f"hydra.job.config.override_dirname.exclude_keys=[{names}]"] if names else []),
    ], sweep_dir
