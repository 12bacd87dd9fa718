"""Memory, descriptors, threads and the journal of a long run, over the fakes (tests/fakes)."""

import gc
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.run import World

from megarl.environment import Action, Environment, Step
from megarl.report.record import load_metrics

FIRST, LAST = 9, 29
"""Iterations that are compared; each is the last before a checkpoint"""
RUN = (
    *("algo=vapo", "algo.value_pretrain.steps=0", f"train.num_iterations={LAST}", "train.eval_every=10"),
    *("environment=class", f"environment.path={__name__}:Raising", "environment.turn_length=5"),
    *("reward.max_failed_frac=0.9", "checkpoint.save_every=10", "logger.num_token_records=2"),
)
AHEAD = ("rollout.max_staleness=1", "algo.mismatch.correction=tis")


class Raising(Environment):
    numbers: Iterator[int] = itertools.count()

    def step(self, action: Action) -> Step:
        if next(self.numbers) % 10 == 0:
            raise ValueError("one in ten")
        return Step("a", done=len(action.token_ids) > 2)


def look(run_dir: Path) -> dict[str, int]:
    gc.collect()
    return {
        "objects": len(gc.get_objects()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "files of the journal": sum(path.is_file() for path in (run_dir / "journal").rglob("*")),
    }


@pytest.mark.parametrize("overrides", [(), AHEAD], ids=["waiting", "ahead"])
def test_nothing_grows_with_the_iterations(overrides: tuple[str, ...], run_dir: Path) -> None:
    seen = list[dict[str, int]]()

    def watch(role: str, verb: str) -> None:
        if (role, verb) == ("policy", "update"):
            seen.append(look(run_dir) if len(seen) + 1 in (FIRST, LAST) else {})

    World(watch=watch).run_job(run_dir, [*RUN, *overrides])
    first, last = seen[FIRST - 1], seen[LAST - 1]
    # Each sample that is kept has several; what is under way ahead of its use varies.
    assert last["objects"] - first["objects"] < 50 * (LAST - FIRST), (first, last)
    for what, spread in {"descriptors": 3, "threads": 24}.items():
        assert last[what] <= first[what] + spread, (what, first, last)
    # Of the iterations since the older of the two checkpoints that are kept, and those ahead; ahead a file per group.
    assert last["files of the journal"] <= 22 * (6 if overrides else 1)
    assert any(line["reward/failed_frac"] > 0 for line in load_metrics(run_dir / "metrics.jsonl")[1:])
