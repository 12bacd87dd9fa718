"""What must hold of a run whose processes were killed, for tools/faults.py.

It is equal to one that nobody touched. With rollout.max_staleness > 0 no two runs are equal, since how far generation
has run ahead depends on timing: such a run must have learned from each group once, from nothing older than allowed, and
from what was complete before the kill in the same order.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.report.metrics import FILE_NAME as METRICS
from megarl.report.metrics import PRETRAINING_FILE_NAME as PRETRAINING_CURVE
from megarl.report.metrics import load_metrics
from megarl.rollout.journal import NAME as JOURNAL
from megarl.rollout.journal import Journal
from megarl.rollout.rollout_file import FILE_NAME as ROLLOUTS

PRETRAINING = "value pretraining"
"""A phase beside those of training: the update of one of its steps, which a plan's iteration then is"""
MEASURED = ("time/", "perf/", "sync/seconds", "sync/verify_share")
"""Beginnings of the metrics that clocks decide"""


def summarize(run_dir: Path) -> dict[str, Any]:
    """What two equal runs have in common."""
    lines = load_metrics(run_dir / METRICS)
    return {
        "weights": {role: hash_file(run_dir / role / "model.safetensors") for role in ("policy", "critic")},
        "rollouts": hash_file(run_dir / "rollouts.jsonl"),
        "metrics": drop_measured(lines),
        PRETRAINING: drop_measured(load_metrics(run_dir / PRETRAINING_CURVE)),
    }


def drop_measured(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if not k.startswith(MEASURED)} for line in lines]


def hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def list_complete(run_dir: Path) -> dict[int, int]:
    """Place -> number of the groups in the journal."""
    return dict(Journal(run_dir / JOURNAL).list_groups(0))


def find_problem(
    run_dir: Path, *, num_iterations: int, num_groups: int, max_staleness: int, complete: Mapping[int, int]
) -> str | None:
    """What does not hold of a run that has ended; None: all does.

    num_groups: of an iteration. complete: the journal at the kill, as `list_complete` gives it.
    """
    lines = load_metrics(run_dir / METRICS)
    found = [line["iteration"] for line in lines]
    if found != list(range(num_iterations + 1)):
        return f"metrics.jsonl has the iterations {found}"
    oldest = max(line["rollout/staleness_max"] for line in lines[1:])
    if oldest > max_staleness:
        return f"tokens of {oldest:g} versions behind were learned from"
    taken: dict[int, list[int]] = {}
    for record in _read_lines(run_dir / ROLLOUTS):
        if (problem := _check_versions(record)) is not None:
            return problem
        numbers = taken.setdefault(record["iteration"], [])
        if record["group_number"] not in numbers:
            numbers.append(record["group_number"])
    order = [number for iteration in sorted(taken) for number in taken[iteration]]
    return _check_order(order, num_iterations * num_groups) or _check_repeated(order, complete)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of training's responses; those of value pretraining have no number."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [record for record in records if record["iteration"] > 0]


def _check_versions(record: Mapping[str, Any]) -> str | None:
    versions = record["response"]["weight_versions"]
    if 0 <= min(versions) <= max(versions) < record["iteration"]:
        return None
    return f"iteration {record['iteration']} has tokens of versions {min(versions)} to {max(versions)}"


def _check_order(order: Sequence[int], num_groups: int) -> str | None:
    twice = sorted({number for number in order if order.count(number) > 1})
    lost = sorted(set(range(num_groups)) - set(order))
    beyond = sorted(set(order) - set(range(num_groups)))
    problems = {"twice": twice, "never": lost, "beyond the last": beyond}
    return "; ".join(f"groups learned from {how}: {which}" for how, which in problems.items() if which) or None


def _check_repeated(order: Sequence[int], complete: Mapping[int, int]) -> str | None:
    moved = [place for place, number in complete.items() if order[place] != number]
    return f"groups that were complete before are at other places than {moved}" if moved else None
