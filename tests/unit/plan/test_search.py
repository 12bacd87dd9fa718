"""The search: its plans are those of the jobs that its lines make, the fastest first, and never worse than a preset."""

from collections.abc import Sequence

import pytest
from plan_jobs import plan

from megarl.config.load import load_config
from megarl.config.schema.run import Placement
from megarl.plan.assumptions import GIB
from megarl.plan.job import find_models
from megarl.plan.search import NUM_BEST, Change, list_divisions, search
from megarl.plan.tables import list_found

NODE = ("algo=vapo", "model=qwen2_5_7b", "cluster=h100x8")
BIG = ("algo=dapo", "model=qwen32b", "cluster=h100x64")


def find(arguments: Sequence[str], mean: float | None = None, staleness: int = 0) -> list[Change]:
    return search(arguments, find_models(load_config(arguments)), mean, staleness)


@pytest.fixture(scope="module")
def found() -> list[Change]:
    return find(NODE)


def test_every_line_makes_a_job_that_fits_in_the_seconds_that_it_shows(found: list[Change]) -> None:
    assert 1 < len(found) <= NUM_BEST
    lines = [line.strip() for line in list_found("title", found) if line.startswith("     ")]
    for each, line in zip(found, lines, strict=True):
        pasted = plan(*NODE, *(word for word in line.split() if "=" in word))
        assert not pasted.problems
        assert pasted.seconds == each.plan.seconds
        assert each.plan.left >= 4 * GIB


def test_the_fastest_comes_first_and_no_two_are_the_same(found: list[Change]) -> None:
    seconds = [each.plan.seconds.iteration for each in found]
    assert seconds == sorted(seconds)
    assert len({each.overrides for each in found}) == len(found)


def test_the_best_plan_is_never_slower_than_the_preset(found: list[Change]) -> None:
    assert found[0].plan.seconds.iteration <= plan(*NODE).seconds.iteration
    # Of many layouts that are as fast, two are enough here.
    layout = ("policy.parallel.tp=4", "policy.parallel.cp=2", "rollout.tp=8", "cluster.placement=colocated")
    best = find([*BIG, *layout])[0]
    assert best.plan.seconds.iteration <= plan(*BIG).seconds.iteration


def test_keys_of_the_command_line_keep_their_values() -> None:
    fixed = ("cluster.placement=split", "policy.parallel.tp=2", "rollout.tp=1")
    for each in find([*NODE, *fixed]):
        assert not {text.split("=")[0] for text in each.overrides} & {text.split("=")[0] for text in fixed}
        config = load_config([*NODE, *fixed, *each.overrides])
        assert (config.cluster.placement, config.policy.parallel.tp, config.rollout.tp) == (Placement.split, 2, 1)


def test_responses_generated_ahead_need_servers_of_their_own_and_a_loss_for_older_samples() -> None:
    fixed = ("policy.parallel.tp=2", "rollout.tp=1")
    for each in find([*NODE, *fixed], staleness=1):
        assert "rollout.max_staleness=1" in each.overrides
        assert "algo.mismatch.correction=tis" in each.overrides
        config = load_config([*NODE, *fixed, *each.overrides])
        assert config.cluster.placement is not Placement.colocated
        parts = each.plan.seconds
        assert each.plan.seconds.iteration == pytest.approx(max(parts.generation, parts.training) + parts.sync)
    config = load_config([*NODE, "rollout.max_staleness=0"])
    assert Placement.colocated in {division.placement for division in list_divisions(config)}


def test_every_division_uses_the_gpus_of_the_cluster_at_most_once() -> None:
    for algo in ("vapo", "dapo", "grpo"):
        config = load_config([f"algo={algo}", "model=qwen32b", "cluster=h100x64"])
        for each in list_divisions(config):
            assert each.servers > 0
            roles = {"vapo": 2 * each.trained, "dapo": each.trained, "grpo": each.trained + each.reference}[algo]
            taken = {Placement.colocated: max(each.trained, each.servers), Placement.split: each.trained + each.servers}
            assert taken.get(each.placement, roles + each.servers) == 64


def test_one_small_gpu_that_all_share_has_a_plan_no_slower_than_the_preset() -> None:
    hardware = "gpu: X, memory_gib: 23.5, bf16_tflops: 165, fp8_tflops: 330, hbm_gb_s: 1008, nvlink_gb_s: 32"
    job = ("algo=vapo", "model=qwen3_0_6b", f"cluster.hardware={{{hardware}, network_gb_s: 3, host_memory_gib: 64}}")
    best = find(job)[0]
    assert best.plan.num_gpus == 1
    assert best.plan.left >= 23.5 / 16 * GIB
    assert best.plan.seconds.iteration <= plan(*job).seconds.iteration


def test_where_nothing_fits_nothing_is_found() -> None:
    assert find([*NODE, "cluster.hardware.memory_gib=20"]) == []
