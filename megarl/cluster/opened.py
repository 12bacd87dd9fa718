"""Ray for one run: a cluster of this machine alone, or one that runs already."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from megarl.cluster.address import resolve_host
from megarl.cluster.local import keep_signal_handlers, local_ray, remove_left_over
from megarl.cluster.nodes import Cluster, wait_for_nodes
from megarl.config.cluster import ClusterConfig


@contextmanager
def open_ray(config: ClusterConfig, num_actors: int) -> Iterator[Cluster]:
    """Ray for `num_actors` actors; on leaving, what was started for this run has ended.

    Raises ConnectionError where nothing answers at cluster.ray_address, DeadlineError where nodes are missing.
    """
    opened = local_ray(config, num_actors) if config.ray_address is None else _joined_ray(config)
    with opened as scratch:
        nodes = wait_for_nodes(config.num_nodes, config.nodes_deadline_s)
        yield Cluster(nodes, scratch, resolve_host(config.listen_host), config.listen_host)


@contextmanager
def _joined_ray(config: ClusterConfig) -> Iterator[Path]:
    """This process as the driver of a Ray that others started, and end; gives a folder of this run."""
    remove_left_over()
    scratch = tempfile.mkdtemp(prefix=f"megarl-{os.getpid()}-", dir="/tmp")
    try:
        with keep_signal_handlers():
            ray.init(address=config.ray_address, log_to_driver=False, logging_level="ERROR")
        yield Path(scratch)
    finally:
        # Ray ends this driver's actors.
        ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)
