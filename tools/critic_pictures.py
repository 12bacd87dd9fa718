#!/usr/bin/env python3
"""Pictures of a run's critic, as SVG files, from its metrics.jsonl.

    python tools/critic_pictures.py RUN_DIR OUT_DIR

Explained variance over time, by position and by length; calibration; signal-to-noise ratio of the advantages by
position; error against the mean of the group (K = 1: of the batch). docs/results/critics.md shows them and says how to
read each.
"""

import argparse
import sys
from pathlib import Path

from megarl.report.critic_pictures import write_pictures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("out_dir", type=Path)
    arguments = parser.parse_args()
    try:
        paths = write_pictures(arguments.run_dir.expanduser(), arguments.out_dir.expanduser())
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print("\n".join(map(str, paths)))


if __name__ == "__main__":
    main()
