"""Weights from two tensor-parallel training ranks to a server of two: what arrives, and what verification finds."""

import base64
import hashlib
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from loop_parts import build_policy, find_server
from safetensors.torch import load_file
from servers import API_KEY, running_server, write_tiny_checkpoint
from torch import Tensor

from megarl.cluster.opened import open_ray
from megarl.cluster.workers import WorkerGroup
from megarl.config.placement import DeviceSlot
from megarl.config.schema.roles import Dtype
from megarl.config.schema.run import ClusterConfig, RolloutConfig, Transport
from megarl.interfaces import UNPUBLISHED, SyncError
from megarl.mcore.spec import read_architecture
from megarl.rollout.client import SGLangClient
from megarl.sync.ranks import Ranks
from megarl.sync.sync import DiskSync, ShardSync

pytestmark = pytest.mark.slow

TP = 2


class PlantingSync(ShardSync):
    """Something else is written into the servers after the weights have arrived and before they are verified."""

    plant: Callable[[SGLangClient], None] | None = None

    def _move(self) -> float:
        num_bytes = super()._move()
        if self.plant is not None:
            self.plant(self._clients[0])
        return num_bytes


class PlantingDisk(DiskSync):
    """As `PlantingSync`."""

    plant: Callable[[SGLangClient], None] | None = None

    def _load(self, client: SGLangClient, directory: Path) -> None:
        super()._load(client, directory)
        if self.plant is not None:
            self.plant(client)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy's; the server is started with other weights."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("policy"), seed=2)


@pytest.fixture(scope="module")
def config(rollout_config: RolloutConfig) -> RolloutConfig:
    return RolloutConfig(**{**vars(rollout_config), "tp": TP, "transport": Transport.colocated})


@pytest.fixture(scope="module")
def client(
    tiny_checkpoint: Path, config: RolloutConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangClient]:
    log_file = tmp_path_factory.mktemp("sglang") / "server.log"
    with running_server(config, tiny_checkpoint, log_file, seed=1) as server:
        yield SGLangClient(server.url, vocab_size=55, deadline_s=60.0, api_key=API_KEY)


@pytest.fixture(scope="module")
def policy(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerGroup, Path]]:
    spec = build_policy(checkpoint)
    with open_ray(ClusterConfig(), num_actors=2) as cluster:
        group = WorkerGroup(spec, tmp_path_factory.mktemp("logs"), cluster, (DeviceSlot(), DeviceSlot()), 240.0)
        group.start().result()
        yield group, cluster.scratch
        group.close()


@pytest.fixture
def sync(
    policy: tuple[WorkerGroup, Path], client: SGLangClient, config: RolloutConfig, checkpoint: Path
) -> Iterator[PlantingSync]:
    made = make_sync(policy, client, config, checkpoint)
    yield made
    made.close()


def make_sync(
    policy: tuple[WorkerGroup, Path], client: SGLangClient, config: RolloutConfig, checkpoint: Path
) -> PlantingSync:
    group, scratch = policy
    return PlantingSync(
        group,
        [client],
        config,
        Ranks(group, [client], config, read_architecture(checkpoint), "127.0.0.1"),
        list(range(3, 40)),
        scratch=scratch,
        host="127.0.0.1",
        policy_dtype=Dtype.float32,
    )


def read_shards(checkpoint: Path) -> list[dict[str, Tensor]]:
    """What each server rank must hold, for some tensors of every kind, cut by hand."""
    whole = load_file(checkpoint / "model.safetensors")
    layer = "model.layers.1."
    q, k, v = (whole[f"{layer}self_attn.{x}_proj.weight"].chunk(TP) for x in "qkv")
    gate, up = (whole[f"{layer}mlp.{x}_proj.weight"].chunk(TP) for x in ("gate", "up"))
    shards = []
    for rank in range(TP):
        shards.append(
            {
                "model.norm.weight": whole["model.norm.weight"],
                f"{layer}self_attn.q_norm.weight": whole[f"{layer}self_attn.q_norm.weight"],
                f"{layer}self_attn.qkv_proj.weight": torch.cat([q[rank], k[rank], v[rank]]),
                f"{layer}self_attn.o_proj.weight": whole[f"{layer}self_attn.o_proj.weight"].chunk(TP, 1)[rank],
                f"{layer}mlp.gate_up_proj.weight": torch.cat([gate[rank], up[rank]]),
                f"{layer}mlp.down_proj.weight": whole[f"{layer}mlp.down_proj.weight"].chunk(TP, 1)[rank],
            }
        )
    return shards


def write_directly(client: SGLangClient, shards: list[dict[str, Tensor]]) -> None:
    payloads = [
        base64.b64encode(pickle.dumps([(name, x.clone()) for name, x in own.items()])).decode() for own in shards
    ]
    client.update_weights_from_tensor(payloads, "direct", flush_cache=False)


def assert_holds(client: SGLangClient, shards: list[dict[str, Tensor]]) -> None:
    """By SGLang's own checksums, SHA-256 over the bytes of each tensor."""
    for found, own in zip(client.load_checksums(), shards, strict=True):
        for name, x in own.items():
            assert found[name] == hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()[:16], name


def locate_apart(locate: Callable[[], Any]) -> Any:
    """As if the second training rank were on another node: its buckets go over a process group, the first one's through
    memory.
    """
    (sources, targets), pids = locate()
    return ([sources[0], "another"], targets), pids


@pytest.mark.parametrize(
    ("transport", "kind"),
    [(Transport.colocated, "memory"), (Transport.split, "group"), (Transport.colocated, "mixed")],
    ids=["memory", "group", "mixed"],
)
def test_every_server_rank_holds_its_shard_of_the_policy_and_no_byte_moved_twice(
    transport: Transport,
    kind: str,
    policy: tuple[WorkerGroup, Path],
    client: SGLangClient,
    config: RolloutConfig,
    checkpoint: Path,
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sync = make_sync(policy, client, RolloutConfig(**{**vars(config), "transport": transport}), checkpoint)
    if kind == "mixed":
        monkeypatch.setattr(sync._ranks, "_locate", partial(locate_apart, sync._ranks._locate))
    client.pause()
    client.begin_update()
    write_directly(client, read_shards(tiny_checkpoint))
    client.end_update()
    client.resume()
    for version in (3, 4):
        metrics = sync.publish(version)
        assert_holds(client, read_shards(checkpoint))
        assert client.load_weight_version() == version
    assert metrics["sync/bytes_over_bound"] == 1.0
    session = sync._ranks.session
    assert session is not None
    assert {source for source, _ in session.near} == ({0} if kind == "mixed" else {0, 1})
    assert {source for pairs in session.far for source, _ in pairs} == ({1} if kind == "mixed" else set())
    assert metrics["sync/probe_logprob_gap"] < 1e-4
    assert 0 < metrics["sync/verify_share"] < 1
    sync.close()


def corrupt_one_element(shards: list[dict[str, Tensor]], stale: list[dict[str, Tensor]]) -> str:
    name = "model.layers.1.mlp.down_proj.weight"
    changed = shards[1][name].clone()
    changed[17, 5] += 1e-6
    shards[1] = {name: changed}
    shards[0] = {}
    return f"rank 1: the checksum of {name} "


def swap_shards(shards: list[dict[str, Tensor]], stale: list[dict[str, Tensor]]) -> str:
    name = "model.layers.1.self_attn.o_proj.weight"
    shards[0], shards[1] = {name: shards[1][name]}, {name: shards[0][name]}
    return f"rank 0: the checksum of {name} "


def keep_a_stale_bucket(shards: list[dict[str, Tensor]], stale: list[dict[str, Tensor]]) -> str:
    name = "model.layers.1.mlp.gate_up_proj.weight"
    shards[0], shards[1] = {name: stale[0][name]}, {}
    return f"rank 0: the checksum of {name} "


def assert_refuted_and_mended(
    sync: "PlantingSync | PlantingDisk", client: SGLangClient, planted: list[dict[str, Tensor]], message: str
) -> None:
    """A sync fails over what is planted in it, and the server serves under no version; the next one succeeds."""
    sync.plant = lambda client: write_directly(client, planted)
    with pytest.raises(SyncError, match=message):
        sync.publish(6)
    assert client.load_weight_version() == UNPUBLISHED
    sync.plant = None
    sync.publish(6)
    assert client.load_weight_version() == 6


@pytest.mark.parametrize("corrupt", [corrupt_one_element, swap_shards, keep_a_stale_bucket])
def test_a_wrong_weight_fails_the_checksums_and_is_served_under_no_version_and_the_next_sync_mends_it(
    corrupt: Callable[..., str],
    sync: PlantingSync,
    client: SGLangClient,
    checkpoint: Path,
    tiny_checkpoint: Path,
) -> None:
    sync.publish(5)
    planted = read_shards(checkpoint)
    message = corrupt(planted, read_shards(tiny_checkpoint))
    assert_refuted_and_mended(sync, client, planted, message)
    assert_holds(client, read_shards(checkpoint))


def test_a_gap_beyond_a_given_bound_ends_the_first_sync_and_its_version_is_withdrawn(
    policy: tuple[WorkerGroup, Path], client: SGLangClient, config: RolloutConfig, checkpoint: Path
) -> None:
    sync = make_sync(policy, client, replace(config, max_probe_logprob_gap=1e-12), checkpoint)
    with pytest.raises(SyncError, match=rf"{client.url} computes another model than the policy from the same weights"):
        sync.publish(8)
    assert client.load_weight_version() == UNPUBLISHED
    sync.close()


def find_processes(kind: str, policy: tuple[WorkerGroup, Path], client: SGLangClient) -> list[psutil.Process]:
    """The second training rank, or the server with its ranks."""
    if kind == "rank":
        return [psutil.Process(ray.get(policy[0]._ranks.identities[1])[1])]
    server = find_server(client.url)
    assert server is not None
    return [server, *server.children(recursive=True)]


@pytest.mark.parametrize("transport", Transport)
@pytest.mark.parametrize("kind", ["rank", "server"])
def test_a_process_that_stops_in_a_sync_ends_it_at_the_deadline_and_the_next_sync_is_fine(
    kind: str,
    transport: Transport,
    policy: tuple[WorkerGroup, Path],
    client: SGLangClient,
    config: RolloutConfig,
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    config = replace(config, transport=transport, sync_deadline_s=5.0)
    impatient = SGLangClient(client.url, vocab_size=55, deadline_s=5.0, api_key=API_KEY)
    ranks = Ranks(policy[0], [impatient], config, read_architecture(checkpoint), "127.0.0.1")
    tokens = list(range(3, 40))
    sync: PlantingSync | PlantingDisk
    if transport is Transport.disk:
        directory = tmp_path / "weights"
        sync = PlantingDisk(policy[0], [impatient], config, directory, tokens, policy_dtype=Dtype.float32, ranks=ranks)
    else:
        where = {"scratch": policy[1], "host": "127.0.0.1", "policy_dtype": Dtype.float32}
        sync = PlantingSync(policy[0], [impatient], config, ranks, tokens, **where)
    sync.publish(30)
    stopped = find_processes(kind, policy, client)

    def stop(_: SGLangClient) -> None:
        for process in stopped:
            process.suspend()

    # Between the arrival of the weights and the checksums.
    sync.plant = stop
    try:
        with pytest.raises(RuntimeError) as error:
            sync.publish(31)
    finally:
        for process in stopped:
            process.resume()
    name = client.url if kind == "server" else "rank 1/2"
    assert name in str(error.value)
    assert "5 s" in str(error.value)
    sync.plant = None
    impatient.reset()
    sync.reconnect()
    sync.publish(32)
    assert client.load_weight_version() == 32
    assert_holds(client, read_shards(checkpoint))
    sync.close()
    impatient.close()


def test_a_server_of_another_model_is_refused_before_a_byte_moves(
    policy: tuple[WorkerGroup, Path], client: SGLangClient, config: RolloutConfig, checkpoint: Path
) -> None:
    sync = make_sync(policy, client, config, checkpoint)
    ranks = sync._ranks
    ranks._arch = replace(ranks._arch, vocab_size=200)
    before = client.load_checksums()
    with pytest.raises(
        SyncError, match=r"rank 0: holds lm_head.weight as \d+ x 64; the policy's model makes it 128 x 64"
    ):
        sync.publish(9)
    assert client.load_checksums() == before
    sync.close()


def test_a_receiver_that_fails_takes_no_server_down(sync: PlantingSync, client: SGLangClient) -> None:
    sync.publish(10)
    real = sync._describe_transport
    sync.reconnect()
    sync._describe_transport = lambda *args: real(*args) | {"directories": ["/proc/nowhere"] * 2, "deadline_s": 2.0}
    with pytest.raises((SyncError, RuntimeError), match="nowhere"):
        sync.publish(11)
    sync._describe_transport = real
    sync.publish(11)
    assert client.is_healthy()
    assert client.load_weight_version() == 11


def test_weights_that_came_over_disk_are_verified_by_their_checksums_too(
    policy: tuple[WorkerGroup, Path], client: SGLangClient, config: RolloutConfig, checkpoint: Path, tmp_path: Path
) -> None:
    group, _ = policy
    ranks = Ranks(group, [client], config, read_architecture(checkpoint), "127.0.0.1")
    tokens = list(range(3, 40))
    # In bfloat16 the probe text alone would let it pass.
    sync = PlantingDisk(group, [client], config, tmp_path, tokens, policy_dtype=Dtype.bfloat16, ranks=ranks)
    sync.publish(20)
    assert_holds(client, read_shards(checkpoint))
    planted = read_shards(checkpoint)
    assert_refuted_and_mended(sync, client, planted, corrupt_one_element(planted, []))
    sync.close()


def test_a_full_file_system_ends_a_sync_over_disk_with_its_folder_and_the_next_sync_is_fine(
    policy: tuple[WorkerGroup, Path], client: SGLangClient, config: RolloutConfig, checkpoint: Path, tmp_path: Path
) -> None:
    group, _ = policy
    ranks = Ranks(group, [client], config, read_architecture(checkpoint), "127.0.0.1")
    sync = DiskSync(group, [client], config, tmp_path, list(range(3, 40)), policy_dtype=Dtype.float32, ranks=ranks)
    writer = psutil.Process(ray.get(group._ranks.identities[0])[1])
    before = writer.rlimit(psutil.RLIMIT_FSIZE)
    writer.rlimit(psutil.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        with pytest.raises(RuntimeError, match=rf"File too large: '{tmp_path}/\.?v40"):
            sync.publish(40)
    finally:
        writer.rlimit(psutil.RLIMIT_FSIZE, before)
    sync.publish(40)
    assert client.load_weight_version() == 40
    assert_holds(client, read_shards(checkpoint))
    sync.close()
