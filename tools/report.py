#!/usr/bin/env python3
"""The report of a sweep: one HTML page that needs no network and no other file.

    python tools/report.py SWEEP_DIR [--out FILE.html]

Which runs there are and what differs between them, their curves laid over one another, the effect of each parameter
with its spread over seeds, what failed and why. Runs that are still at work are shown as far as they are; files that
are missing or damaged are named on the page. Without --out: SWEEP_DIR/report.html.
"""

import argparse
import sys
from pathlib import Path

from megarl.report.sweep import load_sweep
from megarl.report.sweep_page import format_page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep_dir", type=Path)
    parser.add_argument("--out", type=Path, help="where the page goes")
    arguments = parser.parse_args()
    sweep = load_sweep(arguments.sweep_dir.expanduser().resolve())
    if not sweep.runs:
        print(f"error: {sweep.directory}: holds no run; it must be the hydra.sweep.dir of a sweep", file=sys.stderr)
        sys.exit(2)
    out = arguments.out or sweep.directory / "report.html"
    partial = out.with_name(f".{out.name}.partial")
    partial.write_text(format_page(sweep), encoding="utf-8")
    partial.replace(out)
    print(f"{len(sweep.runs)} runs: {out}")


if __name__ == "__main__":
    main()
