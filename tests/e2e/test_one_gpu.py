"""Roles and servers that share a GPU: who is started first, and memory that is given back and taken again.

The server is real. The GPUs are counted and need not be there; on a CPU SGLang takes the calls and keeps the memory.
"""

import re
from pathlib import Path

import pytest
from fakes.run import load_untimed
from loop_parts import SIZES, find_server, hosts_of, open_trainer

from megarl.config.load import load_config
from megarl.interfaces import UNPUBLISHED
from megarl.run.inputs import load_inputs
from megarl.run.job import Resources, open_resources

pytestmark = pytest.mark.slow

COLOCATED = ("cluster.gpus_per_node=1", "cluster.placement=colocated")
SHARED = (
    *("algo=vapo", "algo.value_pretrain.steps=2", *COLOCATED),
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


def train(resources: Resources, run_dir: Path, overrides: list[str]) -> list[dict[str, float]]:
    """The run's metrics, without what follows from the time taken."""
    run_dir.mkdir()
    with open_trainer(resources, run_dir, overrides) as trainer:
        trainer.run()
    return load_untimed(run_dir)


def test_memory_given_back_and_taken_again_changes_no_number_of_a_run(server, tiny_checkpoint, tmp_path):
    overrides = [*SHARED, f"model.path={tiny_checkpoint}"]
    cluster_config = load_config([*SIZES, *overrides]).cluster
    with hosts_of(server, 2, cluster_config) as resources:
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


@pytest.mark.long
def test_servers_that_share_gpus_are_started_after_the_roles(tiny_checkpoint, tmp_path, monkeypatch):
    overrides = ["algo=grpo", *COLOCATED, f"model.path={tiny_checkpoint}"]
    config = load_config([*SIZES, *overrides])
    logs = tmp_path / "logs"
    with open_resources(config, load_inputs(config).checkpoint, logs) as (cluster, servers):
        assert servers.find_lost() == {}
        seen, start = [], servers.start

        def start_servers():
            seen.append({path.name for path in logs.glob("*.log")} & {"policy-0.log", "server-0.log"})
            return start()

        monkeypatch.setattr(servers, "start", start_servers)
        with open_trainer((cluster, servers), tmp_path, overrides) as trainer:
            assert seen[0] == {"policy-0.log"}
            [client] = trainer.components.engine.clients
            assert client.load_weight_version() == UNPUBLISHED
            server = find_server(client.url)
            assert server is not None
            assert server.environ()["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "false"
        # The next attempt finds it running, or starts it where it was lost.
        assert servers.find_lost() == {}
        urls = servers.start().result()
        server.kill()
        lost = servers.find_lost()
        assert list(lost) == ["SGLang server 0/1"]
        servers.end(lost)
        assert find_server(urls[0]) is None
        assert servers.start().result() == urls
        assert servers.find_lost() == {}
