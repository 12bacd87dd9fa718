"""Servers that share GPUs with roles, on real processes: GPUs are counted, and none has to be there for that."""

import contextlib
from dataclasses import replace

import psutil
import pytest
from loop_parts import SIZES, open_trainer

from megarl.config.load import load_config
from megarl.inputs import load_inputs
from megarl.job import open_hosts
from megarl.seams import UNPUBLISHED

OVERRIDES = ["algo=grpo", "cluster.gpus_per_node=1", "cluster.placement=colocated"]


def find_server() -> psutil.Process:
    """The server's process, which is below this one."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[1:3] == ["-m", "sglang.launch_server"]:
                return process
    raise AssertionError("no server")


def test_servers_that_share_gpus_are_started_after_the_roles(tiny_checkpoint, tmp_path):
    overrides = [*OVERRIDES, f"model.path={tiny_checkpoint}"]
    config = load_config([*SIZES, *overrides])
    logs = tmp_path / "logs"
    with open_hosts(config, load_inputs(config), logs) as hosts:
        assert hosts.servers is not None
        assert hosts.servers.find_lost() == {}
        seen = []

        def start_servers():
            seen.append({path.name for path in logs.glob("*.log")} & {"policy-0.log", "server-0.log"})
            return hosts.start_servers()

        with open_trainer(replace(hosts, start_servers=start_servers), tmp_path, overrides) as trainer:
            assert seen[0] == {"policy-0.log"}
            [client] = trainer.parts.engine.clients
            assert client.load_weight_version() == UNPUBLISHED
            assert find_server().environ()["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "false"
        # The next attempt finds it running, or starts it where it was lost.
        assert hosts.servers.find_lost() == {}
        urls = hosts.start_servers().result()
        find_server().kill()
        lost = hosts.servers.find_lost()
        assert list(lost) == ["SGLang server 0/1"]
        hosts.servers.end(lost)
        with pytest.raises(AssertionError, match="no server"):
            find_server()
        assert hosts.start_servers().result() == urls
        assert hosts.servers.find_lost() == {}
