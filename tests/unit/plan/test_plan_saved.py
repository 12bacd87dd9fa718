"""The plan of a job that trains from saved rollouts: no servers, all GPUs the roles'."""

from megarl.config.load import load_config
from megarl.config.schema.cluster import Placement
from megarl.plan.job import build_plan, find_models
from megarl.plan.search import Division, list_divisions
from megarl.plan.tables import list_tables

GIVEN = ("model=qwen3_0_6b", "cluster=h100x8", "rollout.file=r.jsonl", "algo.mismatch.correction=tis")


def test_nothing_is_generated_or_sent() -> None:
    roles = ("policy.parallel.num_processes=4", "critic.parallel.num_processes=4")
    config = load_config(["algo=ppo", *GIVEN, *roles])
    plan = build_plan(config, find_models(config))
    assert plan.problems == ()
    assert plan.server is None
    assert (plan.seconds.generation, plan.seconds.sync, plan.transfer.total) == (0.0, 0.0, 0)
    assert plan.num_gpus == 8
    assert plan.places["servers"] == ()
    texts = [str(table.title) if hasattr(table, "title") else table for table in list_tables(config, plan)]
    assert not any("server:" in text for text in texts)


def test_the_search_divides_all_gpus_among_the_roles() -> None:
    divisions = list(list_divisions(load_config(["algo=ppo", *GIVEN])))
    assert Division(Placement.split, 8, 8, 0) in divisions
    assert Division(Placement.apart, 4, 0, 0) in divisions
    assert {division.servers for division in divisions} == {0}
    alone = list(list_divisions(load_config(["algo=lite_ppo", *GIVEN])))
    assert alone == [Division(Placement.split, 8, 8, 0)]
