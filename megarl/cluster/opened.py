"""Ray for one run: a cluster of this machine alone, or one that is already running."""

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

from megarl.cluster import ray_calls
from megarl.cluster.address import resolve_host
from megarl.cluster.joining import find_own_processes, joined_ray
from megarl.cluster.local import local_ray, remove_left_over
from megarl.cluster.nodes import POLL_S, Cluster, count_gpus, wait_for_nodes
from megarl.config.placement import find_ray_address
from megarl.config.schema.cluster import ClusterConfig
from megarl.interfaces import DeadlineError


@contextmanager
def open_ray(config: ClusterConfig, num_actors: int) -> Iterator[Cluster]:
    """Ray for `num_actors` actors; on leaving, what was started for this run is shut down.

    Raises DeadlineError where nothing answers at cluster.ray_address, and where nodes are missing; RayLostError where
    Ray itself does not answer; ConfigError where a node has fewer GPUs than cluster.gpus_per_node.
    """
    opened = local_ray(config, num_actors) if config.ray_address is None else _joined_ray(config)
    with opened as scratch:
        nodes = wait_for_nodes(config.num_nodes, config.nodes_deadline_s)
        if config.gpus_per_node > 0:
            nodes = count_gpus(nodes[: config.num_nodes], config.gpus_per_node, config.nodes_deadline_s)
        yield Cluster(nodes, scratch, resolve_host(config.listen_host), config.listen_host)


@contextmanager
def _joined_ray(config: ClusterConfig) -> Iterator[Path]:
    """Joins, as the driver, a Ray that others start and shut down; yields a scratch folder of this run."""
    address = find_ray_address(str(config.ray_address))
    _wait_for_ray(address, config.nodes_deadline_s)
    remove_left_over()
    ray_calls.begin(config.ray_deadline_s)
    scratch = tempfile.mkdtemp(prefix=f"megarl-{os.getpid()}-", dir="/tmp")
    # As `ray start` does: the address alone would not make ray.init use the user's key, where there is one.
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        with joined_ray(address, config.shutdown_deadline_s / 3):
            ray_calls.watch(find_own_processes())
            yield Path(scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _wait_for_ray(address: str, deadline_s: float) -> None:
    """Wait until something listens at the address: Ray itself would try for minutes without a message."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + deadline_s
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=POLL_S).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise DeadlineError(
                    f"nothing listens at {address} (cluster.ray_address) within {deadline_s:g} s"
                    f" (cluster.nodes_deadline_s): {error}"
                ) from error
        time.sleep(POLL_S)
