"""What fault_runs.py finds in a run with rollout.max_staleness > 0."""

import json
import re
from pathlib import Path

import fault_runs
import pytest


def write_run(run_dir: Path, taken: list[list[int]], oldest: float = 1.0, newest: int = 0) -> None:
    """newest: added to the version of each iteration's last token."""
    lines = [{"iteration": i} | ({"rollout/staleness_max": oldest} if i else {}) for i in range(len(taken) + 1)]
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    records = [{"iteration": 0, "response": {"weight_versions": [0]}}]
    for iteration, numbers in enumerate(taken, start=1):
        versions = {"weight_versions": [0, iteration - 1 + newest]}
        records += [{"iteration": iteration, "group_number": n, "response": versions} for n in numbers for _ in "ab"]
    (run_dir / "rollouts.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))


@pytest.mark.parametrize(
    ("given", "complete", "problem"),
    [
        ({"taken": [[1, 0], [3, 2]]}, {0: 1, 2: 3}, None),
        ({"taken": [[1, 0], [3, 2]]}, {0: 1, 2: 2}, r"other places than \[2\]"),
        ({"taken": [[1, 0], [1, 2]]}, {}, r"twice: \[1\]; groups learned from never: \[3\]"),
        ({"taken": [[1, 0], [4, 3]]}, {}, r"never: \[2\]; groups learned from beyond the last: \[4\]"),
        ({"taken": [[1, 0]]}, {}, r"iterations \[0, 1\]"),
        ({"taken": [[1, 0], [3, 2]], "oldest": 3.0}, {}, "tokens of 3 versions behind"),
        ({"taken": [[1, 0], [3, 2]], "newest": 1}, {}, "iteration 1 has tokens of versions 0 to 1"),
    ],
)
def test_what_is_lost_or_twice_or_too_old_or_moved_is_found(tmp_path, given, complete, problem):
    write_run(tmp_path, **given)
    found = fault_runs.find_problem(tmp_path, 2, complete, num_iterations=2, num_groups=2)
    assert found is None if problem is None else re.search(problem, found or "")
