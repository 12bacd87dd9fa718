#!/usr/bin/env python3
"""The report of a run, or one that compares several: one HTML file that needs no network and no other file.

    megarl report RUN_DIR [--out FILE.html]
    megarl report SWEEP_DIR | RUN_DIR RUN_DIR ... [--out FILE.html]

Of a run: its curves, critic, mismatch of the engines, time, configuration, warnings with what to do, and some of its
responses token by token. Of the runs of a sweep, or of those that are named: what differs between them, their curves
laid over one another, the spread of each setting over its seeds, what failed and why. Runs that are
still in progress are shown as far as they are; files that are missing or damaged are named on the page. Without --out:
report.html in the folder, of several runs in the one above them.
"""

import argparse
import os
import sys
from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.config.load import find_changes
from megarl.report.page import Changes, format_comparison, format_run_page
from megarl.report.record import RunRecord, is_run, load_run, load_runs, load_sweep


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="megarl report", description=__doc__, formatter_class=form)
    parser.add_argument("directories", type=Path, nargs="+", metavar="RUN_DIR or SWEEP_DIR")
    parser.add_argument("--out", type=Path, help="where the file goes")
    arguments = parser.parse_args()
    directories = [path.expanduser().resolve() for path in arguments.directories]
    try:
        page, what = build_page(directories)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    out = arguments.out or Path(os.path.commonpath(directories)) / "report.html"
    partial = out.with_name(f".{out.name}.partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(out)
    print(f"{what}: {out}")


def build_page(directories: list[Path]) -> tuple[str, str]:
    """The page, and what it is of. Raises ValueError naming a folder that has no run."""
    if len(directories) > 1:
        for directory in directories:
            if not is_run(directory):
                raise ValueError(f"{directory}: is not the folder of a run: it has neither run.json nor metrics.jsonl")
        runs = load_runs(directories)
        return format_comparison(" and ".join(run.name for run in runs[:4]), runs), f"{len(runs)} runs"
    if is_run(directories[0]):
        run = load_run(directories[0])
        return format_run_page(run, _find_changes(run)), f"{run.history.num_iterations} iterations"
    if runs := load_sweep(directories[0]):
        return format_comparison(f"Sweep {directories[0].name}", runs), f"{len(runs)} runs"
    raise ValueError(
        f"{directories[0]}: holds no run; it must be the folder of a run, with run.json or metrics.jsonl, or the"
        " hydra.sweep.dir of a sweep"
    )


def _find_changes(run: RunRecord) -> Changes:
    """Nothing where the run's configuration is not known, or does not compose here, which the page says."""
    if not run.config:
        return [], {}
    try:
        return find_changes(run.overrides, run.config)
    except ConfigError as error:
        run.problems.append(f"the run's preset cannot be composed here: {'; '.join(error.problems)}")
        return [], {}


if __name__ == "__main__":
    main()
