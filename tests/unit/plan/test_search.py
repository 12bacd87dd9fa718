"""The search: its plans are those of the jobs that its lines make, the fastest first, and never worse than a preset."""

from collections.abc import Sequence

import pytest
from plan_jobs import plan

from megarl.config.load import load_config
from megarl.config.placement import list_groups
from megarl.config.schema.run import Placement
from megarl.plan.assumptions import GIB
from megarl.plan.job import find_models
from megarl.plan.search import NUM_BEST, Change, list_divisions, search
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
    assert seconds[0] < plan(*NODE).seconds.iteration
    assert len({each.overrides for each in found}) == len(found)
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


@pytest.mark.parametrize("algo", ["vapo", "dapo", "grpo"])
def test_every_division_uses_the_gpus_of_the_cluster_once(algo: str) -> None:
    config = load_config([f"algo={algo}", "model=qwen32b", "cluster=h100x64"])
    taken = {Placement.colocated: max, Placement.split: lambda sizes: sizes[0] + sizes[-1], Placement.apart: sum}
    for each in list_divisions(config):
        sizes = [size for key, size in each.items() if key.endswith("num_processes")]
        assert len(sizes) == len(list_groups(config)) - 1
        assert each["servers"] > 0
        assert taken[each["cluster.placement"]]([*sizes, each["servers"]]) == 64


def test_one_small_gpu_that_all_share_has_a_plan_no_slower_than_the_preset() -> None:
    hardware = "gpu: X, memory_gib: 23.5, bf16_tflops: 165, fp8_tflops: 330, hbm_gb_s: 1008, nvlink_gb_s: 32"
    job = ("algo=vapo", "model=qwen3_0_6b", f"cluster.hardware={{{hardware}, network_gb_s: 3, host_memory_gib: 64}}")
    best = find(job)[0]
    assert best.plan.num_gpus == 1
    assert best.plan.left >= 23.5 / 16 * GIB
    assert best.plan.seconds.iteration <= plan(*job).seconds.iteration


def test_saved_rollouts_are_searched_without_servers() -> None:
    saved = ("algo=lite_ppo", "model=qwen3_0_6b", "cluster=h100x8", "rollout.file=r.jsonl", "policy.parallel.tp=1")
    best = find([*saved, "algo.mismatch.correction=tis"])[0]
    assert best.plan.num_gpus == 8
    assert best.plan.seconds.generation == 0


def test_where_nothing_fits_nothing_is_found() -> None:
    assert find([*NODE, *FIXED, "cluster.hardware.memory_gib=20"]) == []
