"""What a process has on its node: GPUs and the cores near them, addresses, NCCL's settings; by real Ray and by hand;
waiting for calls that a signal has cut short, and turns; what killed drivers leave.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import ray
import torch.distributed as dist

from megarl.cluster import calls, process
from megarl.cluster.actors import Servers, Turns, WorkerGroup
from megarl.cluster.calls import WorkerError
from megarl.cluster.opened import Cluster, open_ray, remove_left_over
from megarl.cluster.process import Gpu, SmiGpu, ask_nvidia_smi, build_variables, choose_gpus, use_gpus
from megarl.config.errors import ConfigError
from megarl.config.placement import Group, place
from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.roles import Dtype, ParallelConfig
from megarl.config.schema.root import ClusterConfig, Placement, RolloutConfig
from megarl.mcore.device import claim_gpu
from megarl.mcore.spec import Role, WorkerSpec
from megarl.signals import Stopped

LINES = "0, GPU-aaaa, 00000000:18:00.0, Disabled\n1, GPU-bbbb, 00000000:9A:00.0, [N/A]"
MODEL = {
    **{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 32, "hidden_act": "silu"},
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 64},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
}
EIGHT = tuple(SmiGpu(str(number), f"GPU-{number}{number}", f"0000:{number}0:00.0", False) for number in range(8))


def use_in_thread(gpus: str, devices: Path, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The cores that a thread may use after it was bound; the test's own stay."""
    given, found = [Gpu(name, None) for name in gpus.split(",")], list[set[int]]()
    for name, value in build_variables(given).items():
        monkeypatch.setenv(name, value)

    def use() -> None:
        use_gpus(given, devices)
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    return found[0]


def test_gpus_are_found_and_a_thread_is_bound_to_the_cores_near_its_own_where_they_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = os.sched_getaffinity(0)
    first = min(allowed)
    monkeypatch.setenv("PATH", str(tmp_path))  # without nvidia-smi
    assert use_in_thread("0", tmp_path, monkeypatch) == allowed
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{LINES}\\n'\n")
    program.chmod(0o755)
    # By number and by UUID, under the kernel's address.
    found = ask_nvidia_smi()
    assert [gpu.bus for gpu in found] == ["0000:18:00.0", "0000:9a:00.0"]
    assert [gpu.is_meant_by(name) for gpu in found for name in ("1", "GPU-aaaa")] == [False, True, True, False]
    for bus, text in (("0000:18:00.0", f"{first}-{first},100007"), ("0000:9a:00.0", "100000-100003")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "local_cpulist").write_text(f"{text}\n")
    # The cores near the second are not this job's.
    for gpus, expected in (("0", {first}), ("0,1", {first}), ("1", allowed)):
        assert use_in_thread(gpus, tmp_path, monkeypatch) == expected
    assert os.sched_getaffinity(0) == allowed


@pytest.mark.parametrize(
    ("value", "shown", "names", "uuids"),
    [
        (None, EIGHT, "0,1", "GPU-00,GPU-11"),
        ("4,5,6,7", EIGHT, "4,5,6", "GPU-44,GPU-55,GPU-66"),
        ("7, 2", EIGHT, "7,2", "GPU-77,GPU-22"),
        ("GPU-33,GPU-1", EIGHT, "GPU-33,GPU-1", "GPU-33,GPU-11"),
        # Of a GPU in parts CUDA could be held to no UUID.
        ("0", (replace(EIGHT[0], is_parted=True),), "0", "None"),
        # Where nvidia-smi shows nothing, the list is taken as it is, and else numbers.
        (None, (), "0,1,2", "None,None,None"),
        ("4,5,6", (), "4,5,6", "None,None,None"),
        (
            "4,5",
            EIGHT,
            "4,5,?",
            r"cluster.gpus_per_node: found 3; the job has 2 GPUs on n1 \(MEGARL_GPUS on n1 is '4,5'\)",
        ),
        (None, EIGHT, "?" + 8 * ",?", r"found 9; the job has 8 GPUs on n1 \(nvidia-smi shows no more\)"),
        ("-1", EIGHT, "?", r"MEGARL_GPUS on n1: found '-1'; nvidia-smi shows the GPUs 0-7"),
        ("3,GPU-33", EIGHT, "3,?", r"names one GPU twice: 3 and GPU-33"),
    ],
)
def test_the_jobs_gpus_are_those_of_its_list_in_its_order_and_none_twice_or_of_another_job(
    value: str | None, shown: tuple[SmiGpu, ...], names: str, uuids: str
) -> None:
    """names: ? where there is none, and then what is said in place of the UUIDs."""
    number, variable = len(names.split(",")), ("MEGARL_GPUS", value, shown)
    if "?" in names:
        with pytest.raises(ConfigError, match=uuids):
            choose_gpus("n1", variable, number)
        return
    found = choose_gpus("n1", variable, number)
    assert ",".join(gpu.name for gpu in found) == names
    assert ",".join(str(gpu.uuid) for gpu in found) == uuids


def test_a_process_that_is_shown_other_gpus_ends_and_so_do_two_ranks_of_a_role_on_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = [Gpu("5", "GPU-55")]
    for name, value in build_variables(mine).items():
        monkeypatch.setenv(name, value)
    threads = []
    monkeypatch.setattr(process.torch, "set_num_threads", threads.append)
    use_gpus(mine)
    monkeypatch.setattr(process, "ask_nvidia_smi", lambda: list(EIGHT))
    monkeypatch.setattr(process.os, "sched_getaffinity", lambda pid: set(range(32)))
    use_gpus(mine)
    assert threads == [4]  # of 32 cores that eight GPUs share; nvidia-smi tells of none at first
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES=5 has 0,1,2,3,4,5"):
        use_gpus(mine)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    use_gpus([])
    store = dist.HashStore()
    for rank, gpu in ((0, "GPU-aa"), (1, "GPU-bb"), (1, "GPU-bb")):
        claim_gpu(store, rank, gpu)
    with pytest.raises(RuntimeError, match="ranks 0 and 3 of one role are both on GPU GPU-aa"):
        claim_gpu(store, 3, "GPU-aa")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A real Ray, whose node's job has the GPUs 4 to 7, in an order of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGARL_GPUS", "6,7,4,5")
        patch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
        patch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
        with open_ray(ClusterConfig(gpus_per_node=4), num_actors=8) as opened:
            yield opened


def read_environments(actors: list) -> list[dict[str, str]]:
    """The environments that the actors' processes were started with: the kernel's copy, which no code changes."""
    return [psutil.Process(ray.get(actor.identify.remote())[-1]).environ() for actor in actors]


@pytest.mark.parametrize(
    ("placement", "policy", "critic", "servers"),
    [
        (Placement.colocated, ["6", "7"], ["6", "7"], ["6,7"]),
        (Placement.apart, ["6"], ["7"], ["4,5"]),
        (Placement.split, ["6", "7"], ["6", "7"], ["4,5"]),
    ],
)
def test_processes_are_started_with_the_gpus_of_their_slots_in_their_environment(
    cluster: Cluster, placement: Placement, policy: list[str], critic: list[str], servers: list[str], tmp_path: Path
) -> None:
    groups = [Group("policy", len(policy), 1, 1), Group("critic", len(critic), 1, 1), Group("servers", 1, 2, 2)]
    slots = place(ClusterConfig(gpus_per_node=4, placement=placement), groups)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    started = []
    for role in (Role.policy, Role.critic):
        own = slots[role.value]
        spec = WorkerSpec(
            role, str(tmp_path), ParallelConfig(num_processes=len(own)), None, Dtype.float32, AlgoConfig(), 1.0, 8, 64
        )
        started.append(WorkerGroup(spec, tmp_path, cluster, own, 60.0))
    config = RolloutConfig(kv_cache_tokens=1)
    owners = Servers(config, tmp_path, tmp_path, 1, cluster, slots["servers"], 9.0)
    try:
        ranks = read_environments([actor for group in started for actor in group._actors])
        [owner] = read_environments(owners._actors)
        # Their constructors, which check the same, have not failed.
        assert [ray.get(actor.find_peak.remote()) >= 0 for actor in [*started[0]._actors, *owners._actors]]
    finally:
        for each in (*started, owners):
            each.close()
    assert [each["CUDA_VISIBLE_DEVICES"] for each in ranks] == [*policy, *critic]
    assert owner["CUDA_VISIBLE_DEVICES"] == servers[0]
    assert {each["CUDA_DEVICE_ORDER"] for each in [*ranks, owner]} == {"PCI_BUS_ID"}
    assert {each["CUDA_DEVICE_MAX_CONNECTIONS"] for each in ranks} == {"1"}
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in owner  # SGLang has a number of its own


@pytest.mark.server
@pytest.mark.slow
def test_servers_whose_first_start_failed_are_started_once_more_by_a_restart(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    slots = place(ClusterConfig(gpus_per_node=4), [Group("servers", 1, 1, 1)])["servers"]
    servers = Servers(RolloutConfig(kv_cache_tokens=1), tmp_path, tmp_path, 1, cluster, slots, 9.0)
    try:
        for start in (lambda: servers.start().result(), lambda: servers.restart(servers.names)):
            with pytest.raises(WorkerError, match="start of the SGLang servers"):
                start()
    finally:
        servers.close()
    assert (tmp_path / "server-0.log").read_text().count("-m sglang.launch_server ") == 2


AS_ACTORS = """
import json, os, sys
from pathlib import Path
import torch

def fail(*args, **kwargs):
    raise AssertionError("CUDA was initialized")

torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = torch.cuda.init = fail
torch._C._cuda_getDeviceCount = torch._C._cuda_init = fail
from megarl.cluster.process import Gpu
from megarl.cluster.actors import ServerActor
from megarl.cluster.actors import WorkerActor
from megarl.config.schema.root import RolloutConfig
from megarl.rollout.server import build_environment

folder, gpus, config = Path(sys.argv[1]), [Gpu("5", "GPU-55")], RolloutConfig(kv_cache_tokens=1)
before = dict(os.environ)
(folder / "config.json").write_text("{}")
options = {"config": config, "checkpoint": folder, "log_file": folder / "server.log", "seed": 1}
ServerActor.__ray_metadata__.modified_class(folder / "owner.log", "127.0.0.1", gpus, options)
of_server = build_environment(config, folder)
os.environ.clear()
os.environ.update(before)
WorkerActor.__ray_metadata__.modified_class(str(folder / "rank.log"), "127.0.0.1", gpus)
assert "megarl.mcore.microbatches" in sys.modules, "the import chain is the real one"
found = [{name: each.get(name) for name in sys.argv[2:]} for each in (of_server, os.environ)]
(folder / "found").write_text(json.dumps(found))
"""


@pytest.mark.parametrize("given", [None, "1"])
def test_ranks_and_servers_ask_nothing_of_cuda_before_their_model_and_agree_on_nccl_as_the_job_says(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
    for name, value in build_variables([Gpu("5", "GPU-55")]).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name in names:
        monkeypatch.delenv(name, raising=False)
        if given is not None:
            monkeypatch.setenv(name, given)
    words = [sys.executable, "-c", AS_ACTORS, str(tmp_path), *names, "GLOO_SOCKET_IFNAME"]
    subprocess.run(words, check=True, timeout=300)
    found = json.loads((tmp_path / "found").read_text())
    assert found == [dict.fromkeys(names, given or "0") | {"GLOO_SOCKET_IFNAME": "lo"}] * 2
    # What is set SGLang leaves; a release that does not would differ again.
    source = Path(str(find_spec("sglang").origin)).with_name("srt") / "entrypoints" / "engine.py"
    assert all(f'"{name}" not in os.environ' in source.read_text() for name in names)


def test_a_call_that_a_signal_cuts_short_as_it_begins_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends the process where a call goes on after ray.shutdown."""
    stock, answer = threading.Thread.start, threading.Event()

    def start(thread: threading.Thread) -> None:
        stock(thread)
        raise Stopped(signal.SIGUSR2)

    calls.begin(60.0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(Stopped):
            calls.ask("start of the worker", answer.wait)
    assert not calls.settle(0.0)
    answer.set()
    assert calls.settle(30.0)


class Call:
    """A `Pending` that notes when it begins and when it has ended, which it has once somebody gives it time."""

    def __init__(self, log: list[str], name: str, error: BaseException | None = None):
        self.log, self.name, self.error = log, name, error
        log.append(f"{name} begins")

    def wait(self, timeout_s: float) -> bool:
        if f"{self.name} ends" not in self.log:
            if timeout_s == 0.0:
                return False
            self.log.append(f"{self.name} ends")
        if self.error is not None:
            raise self.error
        return True

    def result(self) -> None:
        self.wait(1.0)


def test_a_call_begins_once_the_calls_of_other_roles_have_ended_and_the_servers_have_given_memory_back() -> None:
    log: list[str] = []
    turns = Turns(one_at_a_time=True)
    turns.free_servers = lambda: log.append("free")
    turns.start("policy", lambda: Call(log, "logprobs"))
    turns.start("policy", lambda: Call(log, "kl"))
    turns.start("critic", lambda: Call(log, "values"))
    turns.start("critic", lambda: Call(log, "update"))
    first = ["free", "logprobs begins", "free", "kl begins"]
    assert log == [*first, "free", "logprobs ends", "kl ends", "values begins", "free", "update begins"]
    del log[:]
    apart = Turns()  # on GPUs of their own
    for name in ("policy", "critic"):
        apart.start(name, lambda name=name: Call(log, name))  # type: ignore[misc]
    assert log == ["policy begins", "critic begins"]


def test_the_failure_of_a_call_is_raised_once_before_the_next_begins_and_after_a_signal_it_is_waited_for() -> None:
    log: list[str] = []
    turns = Turns(one_at_a_time=True)
    turns.start("policy", lambda: Call(log, "update", RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        turns.start("critic", lambda: Call(log, "update of the critic"))
    # What saves the state after the error is not hindered by it.
    turns.start("critic", lambda: Call(log, "save"))
    values = turns.start("critic", lambda: Call(log, "values", RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        values.result()  # Its caller has seen it.
    call = turns.start("policy", lambda: Call(log, "logprobs", KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        turns.start("critic", lambda: Call(log, "more values"))
    call.error = None
    turns.start("critic", lambda: Call(log, "another save"))
    assert len(turns._running) == 1  # Calls that have ended are not held.
    first = ["update begins", "update ends", "save begins", "values begins", "values ends"]
    assert log == [*first, "save ends", "logprobs begins", "logprobs ends", "another save begins"]


def test_folders_of_processes_that_are_gone_are_removed_and_no_others(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone = [f"megarl-{ended.pid}-abc_1", f"megarl-sync-{ended.pid}-x2", f"megarl-sglang-{ended.pid}-z"]
    own = [f"megarl-{os.getpid()}-abc", f"megarl-sync-{os.getpid()}-y"]
    kept = [*own, "megarl-sglang-abc", "megarl-sync-abc", "other"]
    for name in (*gone, *kept):
        (tmp_path / name / "below").mkdir(parents=True)
    remove_left_over([tmp_path])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
