"""Roles and servers that share a GPU and give its memory to each other, with a real server; counted GPUs need not be
there, and on a CPU SGLang takes the calls and keeps the memory."""

import re
from pathlib import Path
from typing import Any

import pytest
from loop_parts import SIZES, open_trainer

from megarl.cluster.opened import open_ray
from megarl.config.load import load_config
from megarl.interfaces import Done
from megarl.report.metrics import load_metrics
from megarl.run.job import RunResources

pytestmark = pytest.mark.slow

SHARED = (
    *("algo=vapo", "algo.value_pretrain.steps=2", "cluster.gpus_per_node=1", "cluster.placement=colocated"),
    *("train.num_iterations=2", "train.samples_per_iteration=64", "train.samples_per_minibatch=32"),
    *("train.eval_every=1", "train.num_eval_prompts=8", "rollout.response_length=16"),
)
TURNS = ("rollout.offload=all", "policy.offload=all", "critic.offload=all")
CALLS = {
    "/release_memory_occupation": "r",
    "/resume_memory_occupation": "t",
    "/begin_weight_update": "b",
    "/end_weight_update": "e",
    "/generate": "g",
}


def train(resources: RunResources, run_dir: Path, overrides: list[str]) -> list[dict[str, Any]]:
    """The run's metrics, without what follows from the time taken."""
    run_dir.mkdir()
    with open_trainer(resources, run_dir, overrides) as trainer:
        trainer.run()
    timed = ("time/", "perf/", "sync/seconds", "sync/verify_share")
    return [
        {k: v for k, v in line.items() if not k.startswith(timed)} for line in load_metrics(run_dir / "metrics.jsonl")
    ]


def test_memory_given_back_and_taken_again_changes_no_number_of_a_run(server, tiny_checkpoint, tmp_path):
    overrides = [*SHARED, f"model.path={tiny_checkpoint}"]
    cluster_config = load_config([*SIZES, *overrides]).cluster
    with open_ray(cluster_config, 2) as cluster:
        resources = RunResources(lambda: Done([server.url]), server.check_alive, cluster, server.api_key)
        expected = train(resources, tmp_path / "kept", overrides)
        start = len(server.log_file.read_text())
        assert train(resources, tmp_path / "offloaded", [*overrides, *TURNS]) == expected
    assert len(expected) == 5
    asked = re.findall(r"POST (/\w+)", server.log_file.read_text()[start:])
    calls = "".join(CALLS.get(path, "") for path in asked)
    # Given back before the roles' calls; weights back, replaced, and the cache back before anything is generated.
    # Three syncs of the loop, one before each of the two rollouts of value pretraining but the first, and one before
    # the evaluation after them.
    assert re.fullmatch("(rtbetg+){5}", calls), calls
    assert server.log_file.read_text()[start:].count('POST /release_memory_occupation HTTP/1.1" 200') == 5
