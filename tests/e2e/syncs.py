"""Syncs between two training ranks and a server, into which a test may plant something else."""

import base64
import contextlib
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from loop_parts import build_policy
from servers import API_KEY, running_server
from torch import Tensor

from megarl.cluster.actors import WorkerGroup
from megarl.cluster.opened import open_ray
from megarl.config.placement import DeviceSlot
from megarl.config.schema.roles import Dtype
from megarl.config.schema.root import ClusterConfig, RolloutConfig, Transport
from megarl.interfaces import UNPUBLISHED, SyncError
from megarl.mcore.spec import read_architecture
from megarl.rollout.client import SGLangClient
from megarl.sync.ranks import Ranks
from megarl.sync.sync import DiskSync, ShardSync


@contextlib.contextmanager
def planting(sync: Any, plant: Callable[[], None]) -> Iterator[None]:
    """`plant` is called after the weights have arrived and before they are verified."""
    move = sync._move

    def move_and_plant(*given: Any) -> None:
        move(*given)
        plant()

    sync._move = move_and_plant
    try:
        yield
    finally:
        del sync._move


@dataclass(frozen=True)
class Sides:
    group: WorkerGroup
    scratch: Path
    client: SGLangClient
    config: RolloutConfig
    checkpoint: Path
    """The policy's"""

    @contextlib.contextmanager
    def open_sync(
        self, folder: Path | None = None, dtype: Dtype = Dtype.float32, client: SGLangClient | None = None, **keys: Any
    ) -> Iterator[Any]:
        """folder: of a sync over disk; dtype: what it takes for the policy's; keys: of `rollout`."""
        config, clients = replace(self.config, **keys), [client or self.client]
        ranks = Ranks(self.group, clients, config, read_architecture(self.checkpoint), "127.0.0.1")
        where = {"directory": folder} if folder else {"scratch": self.scratch, "host": "127.0.0.1"}
        kind = DiskSync if folder else ShardSync
        sync = kind(self.group, clients, config, ranks, list(range(3, 40)), policy_dtype=dtype, **where)
        with contextlib.closing(sync):
            yield sync


@contextlib.contextmanager
def open_sides(config: RolloutConfig, served: Path, checkpoint: Path, folder: Path) -> Iterator[Sides]:
    """A server of the checkpoint `served`, and two ranks of a policy of `checkpoint`, side by side."""
    config = replace(config, transport=Transport.colocated)
    with (
        running_server(config, served, folder / "server.log", seed=1) as server,
        open_ray(ClusterConfig(), num_actors=2) as cluster,
    ):
        client = SGLangClient(server.url, vocab_size=55, deadline_s=60.0, api_key=API_KEY)
        group = WorkerGroup(build_policy(checkpoint), folder / "logs", cluster, (DeviceSlot(), DeviceSlot()), 240.0)
        group.start().result()
        with contextlib.closing(group):
            yield Sides(group, cluster.scratch, client, config, checkpoint)


@contextlib.contextmanager
def updating(client: SGLangClient) -> Iterator[None]:
    """The server lets its weights be replaced meanwhile."""
    client.pause()
    client.begin_update()
    yield
    client.end_update()
    client.resume()


def write_directly(client: SGLangClient, shards: list[dict[str, Tensor]]) -> None:
    """Each server rank's tensors, past the sync."""
    payloads = [
        base64.b64encode(pickle.dumps([(name, x.clone()) for name, x in own.items()])).decode() for own in shards
    ]
    client.update_weights_from_tensor(payloads, "direct", flush_cache=False)


def assert_refuted_and_mended(sync: Any, client: SGLangClient, planted: list[dict[str, Tensor]], message: str) -> None:
    """A sync fails over what is planted in it, and the server serves under no version; the next one succeeds."""
    with planting(sync, lambda: write_directly(client, planted)), pytest.raises(SyncError, match=message):
        sync.publish(6)
    assert client.load_weight_version() == UNPUBLISHED
    sync.publish(6)
    assert client.load_weight_version() == 6


def load_checksums(client: SGLangClient) -> list[dict[str, str]]:
    """For each rank: 16 hex digits by SGLang's tensor name, on a CPU of SHA-256 over the raw bytes."""
    return [rank["checksums"] for rank in client._call("/weights_checker", {"action": "checksum"})["ranks"]]
