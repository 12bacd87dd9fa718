"""Servers that share GPUs with roles, on real processes: GPUs are counted, and none has to be there for that."""

from dataclasses import replace

import pytest
from loop_parts import SIZES, find_server, open_trainer

from megarl.config.load import load_config
from megarl.interfaces import UNPUBLISHED
from megarl.run.inputs import load_inputs
from megarl.run.job import open_resources

pytestmark = pytest.mark.slow

OVERRIDES = ["algo=grpo", "cluster.gpus_per_node=1", "cluster.placement=colocated"]


def test_servers_that_share_gpus_are_started_after_the_roles(tiny_checkpoint, tmp_path):
    overrides = [*OVERRIDES, f"model.path={tiny_checkpoint}"]
    config = load_config([*SIZES, *overrides])
    logs = tmp_path / "logs"
    with open_resources(config, load_inputs(config), logs) as hosts:
        assert hosts.servers is not None
        assert hosts.servers.find_lost() == {}
        seen = []

        def start_servers():
            seen.append({path.name for path in logs.glob("*.log")} & {"policy-0.log", "server-0.log"})
            return hosts.start_servers()

        with open_trainer(replace(hosts, start_servers=start_servers), tmp_path, overrides) as trainer:
            assert seen[0] == {"policy-0.log"}
            [client] = trainer.components.engine.clients
            assert client.load_weight_version() == UNPUBLISHED
            server = find_server(client.url)
            assert server is not None
            assert server.environ()["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "false"
        # The next attempt finds it running, or starts it where it was lost.
        assert hosts.servers.find_lost() == {}
        urls = hosts.start_servers().result()
        server.kill()
        lost = hosts.servers.find_lost()
        assert list(lost) == ["SGLang server 0/1"]
        hosts.servers.end(lost)
        assert find_server(urls[0]) is None
        assert hosts.start_servers().result() == urls
        assert hosts.servers.find_lost() == {}
