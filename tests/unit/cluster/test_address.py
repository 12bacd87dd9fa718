"""Addresses, network interfaces and NCCL's settings of a process on its node."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.cluster.opened import Cluster, Node
from megarl.cluster.process import find_interface, use_interface
from megarl.config.placement import DeviceSlot


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What is set in a test is taken back after it."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "before")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    return monkeypatch


def test_the_interface_of_the_loopback_address_is_lo(variables: pytest.MonkeyPatch) -> None:
    assert find_interface("127.0.0.1") == "lo"
    assert find_interface("192.0.2.77") is None
    use_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_seats_are_described_by_node_and_ranges_of_gpus() -> None:
    cluster = Cluster((Node("n1", "x"), Node("n2", "y")), Path("/tmp"), "127.0.0.1", "auto")
    slots = [DeviceSlot(0, (0,)), DeviceSlot(0, (1,)), DeviceSlot(0, (2,)), DeviceSlot(0, (5,)), DeviceSlot(1, (0, 1))]
    assert cluster.describe(slots) == "n1 GPU 0-2, 5; n2 GPU 0-1"
    assert cluster.describe([DeviceSlot()]) == ""


AS_ACTORS = """
import json, os, sys
from pathlib import Path
from megarl.cluster.servers import ServerActor, ServerSpec
from megarl.cluster.workers import WorkerActor
from megarl.config.placement import DeviceSlot
from megarl.config.schema.rollout import RolloutConfig
from megarl.rollout.server import build_environment

kind, folder = sys.argv[1], Path(sys.argv[2])
if kind == "rank":
    WorkerActor.__ray_metadata__.modified_class(str(folder / "rank.log"), "127.0.0.1", ())
    found = dict(os.environ)
else:
    (folder / "config.json").write_text("{}")
    config = RolloutConfig(kv_cache_tokens=1)
    spec = ServerSpec(config, folder, folder, 0, 1, DeviceSlot(), 0, None, False)
    ServerActor.__ray_metadata__.modified_class(spec, "127.0.0.1", None, ())
    found = build_environment(config, folder)
(folder / kind).write_text(json.dumps({name: found.get(name) for name in sys.argv[3:]}))
"""


@pytest.mark.parametrize("given", [None, "1"])
def test_training_ranks_and_servers_have_the_same_settings_of_nccl_and_the_jobs_own_count(
    given: str | None, tmp_path: Path, variables: pytest.MonkeyPatch
) -> None:
    names = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
    for name in names:
        variables.delenv(name, raising=False)
        if given is not None:
            variables.setenv(name, given)
    for kind in ("rank", "server"):
        words = [sys.executable, "-c", AS_ACTORS, kind, str(tmp_path), *names]
        subprocess.run(words, check=True, timeout=300)
    found = [json.loads((tmp_path / kind).read_text()) for kind in ("rank", "server")]
    assert found == [dict.fromkeys(names, given or "0")] * 2
    # What is set SGLang leaves; a release that does not would differ again.
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).with_name("srt").joinpath("entrypoints", "engine.py").read_text()
    assert all(f'"{name}" not in os.environ' in source for name in names)
