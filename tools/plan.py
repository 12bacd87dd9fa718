"""Whether a job fits its cluster, and what it takes there: the same as `megarl plan` (megarl/plan/command.py)."""

import sys

from megarl.plan.command import main
from megarl.run.command import end_with_closed_pipe

if __name__ == "__main__":
    end_with_closed_pipe()
    sys.exit(main(sys.argv[1:]))
