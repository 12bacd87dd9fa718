"""Weights from two tensor-parallel training ranks to a server of two: what arrives, and what verification finds."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from loop_parts import find_server
from safetensors.torch import load_file
from servers import API_KEY, write_tiny_checkpoint
from syncs import Sides, assert_refuted_and_mended, load_checksums, open_sides, planting, updating, write_directly
from torch import Tensor

from megarl.config.schema.roles import Dtype
from megarl.config.schema.root import RolloutConfig, Transport
from megarl.interfaces import SyncError
from megarl.rollout.client import SGLangClient

pytestmark = pytest.mark.slow

TP = 2


@pytest.fixture(scope="module")
def sides(
    tiny_checkpoint: Path, rollout_config: RolloutConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sides]:
    """The server is started with other weights than the policy's."""
    checkpoint = write_tiny_checkpoint(tmp_path_factory.mktemp("policy"), seed=2)
    config = replace(rollout_config, tp=TP)
    with open_sides(config, tiny_checkpoint, checkpoint, tmp_path_factory.mktemp("sides")) as opened:
        yield opened


def read_shards(checkpoint: Path) -> list[dict[str, Tensor]]:
    """What each server rank must hold, for some tensors of every kind, cut by hand."""
    whole = load_file(checkpoint / "model.safetensors")
    layer = "model.layers.1."
    q, k, v = (whole[f"{layer}self_attn.{x}_proj.weight"].chunk(TP) for x in "qkv")
    gate, up = (whole[f"{layer}mlp.{x}_proj.weight"].chunk(TP) for x in ("gate", "up"))
    return [
        {
            "model.norm.weight": whole["model.norm.weight"],
            f"{layer}self_attn.q_norm.weight": whole[f"{layer}self_attn.q_norm.weight"],
            f"{layer}self_attn.qkv_proj.weight": torch.cat([q[rank], k[rank], v[rank]]),
            f"{layer}self_attn.o_proj.weight": whole[f"{layer}self_attn.o_proj.weight"].chunk(TP, 1)[rank],
            f"{layer}mlp.gate_up_proj.weight": torch.cat([gate[rank], up[rank]]),
            f"{layer}mlp.down_proj.weight": whole[f"{layer}mlp.down_proj.weight"].chunk(TP, 1)[rank],
        }
        for rank in range(TP)
    ]


def assert_holds_the_policy(sides: Sides, version: int) -> None:
    """By SGLang's own checksums, SHA-256 over the bytes of each tensor."""
    assert sides.client.load_weight_version() == version
    for found, own in zip(load_checksums(sides.client), read_shards(sides.checkpoint), strict=True):
        for name, x in own.items():
            assert found[name] == hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()[:16], name


def locate_apart(call: Callable[..., Any], verb: str, *arguments: Any) -> Any:
    """As if the second training rank were on another node: its buckets go over a process group, the first one's through
    memory.
    """
    found = call(verb, *arguments)
    return [found[0], ("another", found[1][1])] if verb == "locate" else found


@pytest.mark.parametrize(
    ("transport", "near", "far"),
    [(Transport.colocated, {0, 1}, set()), (Transport.split, {0, 1}, set()), (Transport.colocated, {0}, {1})],
    ids=["memory", "group", "mixed"],
)
def test_every_server_rank_holds_its_shard_of_the_policy_and_no_byte_moved_twice(
    transport: Transport, near: set[int], far: set[int], sides: Sides, tiny_checkpoint: Path
) -> None:
    with sides.open_sync(transport=transport) as sync:
        if far:
            sync._ranks.call_senders = partial(locate_apart, sync._ranks.call_senders)
        with updating(sides.client):
            write_directly(sides.client, read_shards(tiny_checkpoint))
        for version in (3, 4):
            metrics = sync.publish(version)
            assert_holds_the_policy(sides, version)
        assert metrics["sync/bytes_over_bound"] == 1.0
        assert {source for source, _ in sync._ranks.session.near} == near
        assert {source for pairs in sync._ranks.session.far for source, _ in pairs} == far
        assert metrics["sync/probe_logprob_gap"] < 1e-4
        assert 0 < metrics["sync/verify_share"] < 1


def corrupt_one_element(shards: list[dict[str, Tensor]], stale: list[dict[str, Tensor]]) -> str:
    name = "model.layers.1.mlp.down_proj.weight"
    changed = shards[1][name].clone()
    changed[17, 5] += 1e-6
    shards[:] = {}, {name: changed}
    return f"rank 1: the checksum of {name} "


def swap_shards(shards: list[dict[str, Tensor]], stale: list[dict[str, Tensor]]) -> str:
    name = "model.layers.1.self_attn.o_proj.weight"
    shards[:] = {name: shards[1][name]}, {name: shards[0][name]}
    return f"rank 0: the checksum of {name} "


def keep_a_stale_bucket(shards: list[dict[str, Tensor]], stale: list[dict[str, Tensor]]) -> str:
    name = "model.layers.1.mlp.gate_up_proj.weight"
    shards[:] = {name: stale[0][name]}, {}
    return f"rank 0: the checksum of {name} "


@pytest.mark.parametrize(
    ("corrupt", "over_disk"),
    # In bfloat16 the probe text alone would let it pass.
    [(corrupt_one_element, False), (swap_shards, False), (keep_a_stale_bucket, False), (corrupt_one_element, True)],
)
def test_a_wrong_weight_fails_the_checksums_and_is_served_under_no_version_and_the_next_sync_mends_it(
    corrupt: Callable[..., str], over_disk: bool, sides: Sides, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    with sides.open_sync(**{"folder": tmp_path, "dtype": Dtype.bfloat16} if over_disk else {}) as sync:
        sync.publish(5)
        assert_holds_the_policy(sides, 5)
        planted = read_shards(sides.checkpoint)
        message = corrupt(planted, read_shards(tiny_checkpoint))
        assert_refuted_and_mended(sync, sides.client, planted, message)
        assert_holds_the_policy(sides, 6)


def find_rank(sides: Sides, rank: int) -> psutil.Process:
    return psutil.Process(ray.get(sides.group._ranks.identities[rank])[1])


@pytest.mark.parametrize(
    ("kind", "transport"), [("rank", Transport.split), ("rank", Transport.disk), ("server", Transport.colocated)]
)
def test_a_process_that_stops_in_a_sync_ends_it_at_the_deadline_and_the_next_sync_is_fine(
    kind: str, transport: Transport, sides: Sides, tmp_path: Path
) -> None:
    url = sides.client.url
    impatient = SGLangClient(url, vocab_size=55, deadline_s=5.0, api_key=API_KEY)
    folder = tmp_path / "weights" if transport is Transport.disk else None
    server = find_server(url)
    assert server is not None
    stopped = [find_rank(sides, 1)] if kind == "rank" else [server, *server.children(recursive=True)]

    def stop() -> None:
        for process in stopped:
            process.suspend()

    with sides.open_sync(folder, client=impatient, transport=transport, sync_deadline_s=5.0) as sync:
        sync.publish(30)
        try:
            with planting(sync, stop), pytest.raises(RuntimeError, match="5 s") as error:
                sync.publish(31)
        finally:
            for process in stopped:
                process.resume()
        assert (url if kind == "server" else "rank 1/2") in str(error.value)
        impatient.reset()
        sync.reconnect()
        sync.publish(32)
        assert_holds_the_policy(sides, 32)
    impatient.close()


def test_a_receiver_that_fails_takes_no_server_down(sides: Sides) -> None:
    with sides.open_sync() as sync:
        sync.publish(10)
        real = sync._describe_transport
        sync.reconnect()
        sync._describe_transport = lambda *args: real(*args) | {"directories": ["/proc/nowhere"] * 2, "deadline_s": 2.0}
        with pytest.raises((SyncError, RuntimeError), match="nowhere"):
            sync.publish(11)
        sync._describe_transport = real
        sync.publish(11)
    assert sides.client.is_healthy()
    assert sides.client.load_weight_version() == 11
