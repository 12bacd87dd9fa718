"""The search: its plans are those of the jobs that its lines make, the fastest first, and never worse than a preset."""

from collections.abc import Sequence

import pytest
from plan_jobs import plan

from megarl.config.load import load_config
from megarl.config.schema.run import Placement
from megarl.plan.assumptions import GIB
from megarl.plan.job import find_models
from megarl.plan.search import NUM_BEST, Change, search
from megarl.plan.tables import list_found

NODE = ("algo=vapo", "model=qwen2_5_7b", "cluster=h100x8")
FIXED = ("policy.parallel.tp=2", "rollout.tp=1")


def find(arguments: Sequence[str], staleness: int = 0) -> list[Change]:
    return search(arguments, find_models(load_config(arguments)), None, staleness)


def test_the_fastest_plan_comes_first_and_each_line_makes_a_job_that_fits_in_the_seconds_that_it_shows() -> None:
    found = find(NODE)
    assert 1 < len(found) <= NUM_BEST
    seconds = [each.plan.seconds.iteration for each in found]
    assert seconds == sorted(seconds)
    assert seconds[0] <= plan(*NODE).seconds.iteration
    assert len({frozenset(each.overrides) for each in found}) == len(found)
    lines = [line.strip() for line in list_found("title", found) if line.startswith("     ")]
    for each, line in zip(found, lines, strict=True):
        pasted = plan(*NODE, *(word for word in line.split() if "=" in word))
        assert not pasted.problems
        assert pasted.seconds == each.plan.seconds
        assert each.plan.left >= 4 * GIB


def test_keys_of_the_command_line_keep_their_values() -> None:
    fixed = ("cluster.placement=split", *FIXED)
    for each in find([*NODE, *fixed]):
        assert not {text.split("=")[0] for text in each.overrides} & {text.split("=")[0] for text in fixed}
        config = load_config([*NODE, *fixed, *each.overrides])
        assert (config.cluster.placement, config.policy.parallel.tp, config.rollout.tp) == (Placement.split, 2, 1)


def test_responses_generated_ahead_need_servers_of_their_own_and_a_loss_for_older_samples() -> None:
    found = find([*NODE, *FIXED], staleness=1)
    assert found
    for each in found:
        assert {"rollout.max_staleness=1", "algo.mismatch.correction=tis"} <= set(each.overrides)
        assert load_config([*NODE, *FIXED, *each.overrides]).cluster.placement is not Placement.colocated
        parts = each.plan.seconds
        assert parts.iteration == pytest.approx(max(parts.generation, parts.training) + parts.sync)


def test_where_nothing_fits_nothing_is_found() -> None:
    assert find([*NODE, *FIXED, "cluster.hardware.memory_gib=20"]) == []
