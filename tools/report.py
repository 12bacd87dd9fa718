#!/usr/bin/env python3
"""The page of a run or of a sweep: one HTML file that needs no network and no other file.

    python tools/report.py RUN_DIR [--compare OTHER_RUN_DIR] [--out FILE.html]
    python tools/report.py SWEEP_DIR [--out FILE.html]

Of a run: its curves, critic, mismatch of the engines, time, configuration, warnings with what to do, and some of its
responses token by token. With --compare the curves of a second run lie over them. Of a sweep: which runs there are and
what differs between them, their curves laid over one another, the effect of each parameter with its spread over seeds,
what failed and why. Runs that are still in progress are shown as far as they are; files that are missing or damaged are
named on the page. Without --out: report.html in the folder.
"""

import argparse
import sys
from pathlib import Path

from megarl.report.rollout_viewer import format_viewer
from megarl.report.run_facts import is_run, load_run_facts
from megarl.report.run_page import format_run_page
from megarl.report.sweep import load_sweep
from megarl.report.sweep_page import format_page

VIEWER_BYTES = 4_000_000
"""Largest size of the section with the responses"""


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="megarl report", description=__doc__, formatter_class=form)
    parser.add_argument("directory", type=Path, metavar="RUN_DIR or SWEEP_DIR")
    parser.add_argument("--compare", type=Path, metavar="OTHER_RUN_DIR", help="a second run")
    parser.add_argument("--out", type=Path, help="where the page goes")
    arguments = parser.parse_args()
    given = [arguments.directory, *([arguments.compare] if arguments.compare else [])]
    directories = [path.expanduser().resolve() for path in given]
    if is_run(directories[0]) or arguments.compare:
        page, what = build_run_page(directories)
    else:
        page, what = build_sweep_page(directories[0])
    out = arguments.out or directories[0] / "report.html"
    partial = out.with_name(f".{out.name}.partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(out)
    print(f"{what}: {out}")


def build_run_page(directories: list[Path]) -> tuple[str, str]:
    """The page, and what it is of."""
    for directory in directories:
        if not is_run(directory):
            fail(f"{directory}: is not the folder of a run: it has neither run.json nor metrics.jsonl")
    runs = [load_run_facts(directory) for directory in directories]
    viewer = format_viewer(directories[0], VIEWER_BYTES)
    return format_run_page(runs, viewer), " and ".join(f"{run.history.num_iterations} iterations" for run in runs)


def build_sweep_page(directory: Path) -> tuple[str, str]:
    """The page, and what it is of."""
    sweep = load_sweep(directory)
    if not sweep.runs:
        fail(
            f"{directory}: holds no run; it must be the folder of a run, with run.json or metrics.jsonl, or the"
            " hydra.sweep.dir of a sweep"
        )
    return format_page(sweep), f"{len(sweep.runs)} runs"


def fail(text: str) -> None:
    print(f"error: {text}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
