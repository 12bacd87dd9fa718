"""tests/simulate.py: small jobs of every kind of parallelism are in order and take what is planned, and planted
faults are found by name.
"""

import csv
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
from simulate import (
    WITHIN,
    Call,
    Run,
    check_bytes,
    check_order,
    describe,
    find_place,
    list_places,
    plan_bytes,
    run_rank,
)

from megarl.config.load import load_config
from megarl.config.schema.root import Config
from megarl.mcore.spec import Role

SIZES = ("algo=ppo", "data.prompt_length=8", "rollout.response_length=1016", "train.tokens_per_microbatch=2048")
LAYERS = "hidden_size: 1024, num_heads: 16, num_kv_heads: 8, max_length: 2048"
DENSE = (*SIZES, "model=tiny", f"model.random={{{LAYERS}, ffn_size: 3072, num_layers: 4}}")
WIDE = (
    "model.random={hidden_size: 4096, num_heads: 32, num_kv_heads: 8, max_length: 2048, ffn_size: 12288, num_layers: 4}"
)
EXPERTS = (*SIZES, "model=tiny_moe", f"model.random={{{LAYERS}, ffn_size: 768, num_layers: 2, num_experts: 16}}")
JOBS: dict[str, tuple[str, ...]] = {
    "tensors and stages": (*DENSE, "policy.parallel={num_processes: 8, tp: 2, sp: true, pp: 2}"),
    "pieces of stages": (*DENSE, "policy.parallel={num_processes: 4, tp: 2, sp: true, pp: 2, vpp: 2}"),
    "context and stages": (*DENSE, "policy.parallel={num_processes: 4, pp: 2, cp: 2}", "policy.recompute=full"),
    "several buckets": (*DENSE, WIDE, "policy.parallel={num_processes: 8, tp: 2, sp: true, pp: 2, cp: 2}"),
    "experts": (*EXPERTS, "policy.parallel={num_processes: 4, tp: 2, sp: true, ep: 4}", "policy.recompute=full"),
}


def load(name: str) -> Config:
    return load_config(JOBS[name])


@pytest.fixture(scope="module")
def made() -> dict[str, dict[int, Run]]:
    """The ranks of each place of the jobs."""
    found = {}
    for name in JOBS:
        job, _ = plan_bytes(load(name), Role.policy)
        found[name] = {rank: run_rank(load(name), Role.policy, rank, counts=False) for rank in list_places(job)}
    return found


def play(name: str, runs: Mapping[int, Run]) -> list[str]:
    job, _ = plan_bytes(load(name), Role.policy)
    return check_order(runs, [find_place(job, rank) for rank in range(job.parallel.num_processes)])


@pytest.mark.parametrize("name", JOBS)
def test_all_ranks_make_their_collectives_in_one_order(name: str, made: dict[str, dict[int, Run]]) -> None:
    assert play(name, made[name]) == []
    kinds = {(call.kind, call.group) for run in made[name].values() for call in run.calls}
    if name == "experts":
        assert ("alltoall_base_", "EXPERT_MODEL_PARALLEL_GROUP") in kinds
    else:
        assert ("send", "PIPELINE_MODEL_PARALLEL_GROUP") in kinds


@pytest.mark.parametrize("name", JOBS)
def test_planned_bytes_are_within_a_tenth_of_what_torch_counts(name: str) -> None:
    job, stages = plan_bytes(load(name), Role.policy)
    per_stage = job.parallel.num_processes // job.parallel.pp
    runs = {stage * per_stage: run_rank(load(name), Role.policy, stage * per_stage) for stage in range(len(stages))}
    assert list(check_bytes(runs, {stage * per_stage: planned for stage, planned in enumerate(stages)})) == []


def test_the_docs_have_the_plan_of_every_preset_and_it_is_within_a_tenth_of_the_counted_bytes() -> None:
    table = Path(__file__).resolve().parents[3] / "docs" / "results" / "simulated.csv"
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for (preset, role), lines in groupby(rows, lambda row: (row["preset"], row["role"])):
        _, stages = plan_bytes(load_config(["algo=vapo", f"model={preset}"]), Role(role))
        for row in lines:
            assert row["planned GiB"] in {f"{stage[row['phase']] / 2**30:.3f}" for stage in stages}, row
            assert abs(float(row["ratio"]) - 1) <= WITHIN


def change(runs: Mapping[int, Run], rank: int, kind: str, new: list[Call] | None, **fields: object) -> dict[int, Run]:
    """The runs with the second call of this kind replaced on one rank."""
    calls = list(runs[rank].calls)
    place = [number for number, call in enumerate(calls) if call.kind == kind][1]
    calls[place : place + 1] = [replace(calls[place], **fields)] if new is None else new  # type: ignore[arg-type]
    return {**runs, rank: replace(runs[rank], calls=calls)}


def test_a_rank_that_leaves_out_a_collective_is_named(made: dict[str, dict[int, Run]]) -> None:
    (problem, *_) = play("tensors and stages", change(made["tensors and stages"], 1, "_reduce_scatter_base_", []))
    # Ranks 1 and 3 have the same place.
    assert problem.startswith(
        ("TENSOR_MODEL_PARALLEL_GROUP of 0..1: rank", "TENSOR_MODEL_PARALLEL_GROUP of 2..3: rank")
    )
    assert "rank 1 has" in problem or "rank 3 has" in problem


def test_the_last_call_of_a_rank_that_is_missing_leaves_the_others_waiting(made: dict[str, dict[int, Run]]) -> None:
    runs = made["experts"]
    last = max(number for number, call in enumerate(runs[3].calls) if call.group == "default_pg")
    calls = [*runs[3].calls[:last], *runs[3].calls[last + 1 :]]
    (problem, *_) = play("experts", {**runs, 3: replace(runs[3], calls=calls)})
    assert "rank 3 never makes call" in problem


def test_a_shape_that_the_group_does_not_share_is_named(made: dict[str, dict[int, Run]]) -> None:
    runs = made["experts"]
    (problem, *_) = play("experts", change(runs, 2, "_allgather_base_", None, shapes=((7,), (14,))))
    assert "rank 2 has" in problem
    assert "(7,)" in problem


def test_a_message_of_another_shape_than_the_neighbour_expects_is_named(made: dict[str, dict[int, Run]]) -> None:
    runs = made["context and stages"]
    (problem, *_) = play("context and stages", change(runs, 2, "recv_", None, shapes=((3, 1, 128),)))
    assert problem.startswith("PIPELINE_MODEL_PARALLEL_GROUP, message 1 from 0 to 2")
    assert "(3, 1, 128)" in problem


def test_an_exchange_whose_rows_differ_between_two_ranks_is_named(made: dict[str, dict[int, Run]]) -> None:
    runs = made["experts"]
    call = next(call for call in runs[0].calls if call.kind == "alltoall_base_")
    other = ((call.splits[0][0] + 1, *call.splits[0][1:]), call.splits[1])
    (problem, *_) = play("experts", change(runs, 0, "alltoall_base_", None, splits=other))
    assert f"sends {call.splits[0][0] + 1} rows" in problem


def test_a_table_of_the_planner_that_is_a_fifth_off_is_found() -> None:
    counted = {"held": 100, "log-probs": 150, "update": 200}
    (problem,) = check_bytes({0: Run(0, peaks=counted)}, {0: {**counted, "update": 240}})
    assert problem.startswith("rank 0, update: ")


def test_describe_leaves_out_what_ranks_of_a_group_need_not_share() -> None:
    assert describe(Call("gather_", "g", ((2,), (3,)), "float32")) == describe(Call("gather_", "g", ((3,),), "float32"))
