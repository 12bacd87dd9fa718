"""Bytes of a weight sync: every element that a server rank holds is sent to it once (megarl/sync/plan.py)."""

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.config.schema.rollout import RolloutConfig, Transport
from megarl.config.schema.root import Config
from megarl.plan.activations import ELEMENT_BYTES
from megarl.plan.assumptions import LINK_SHARE
from megarl.plan.roles import RoleJob, StageMemory, count_replicas


@dataclass(frozen=True)
class Transfer:
    total: int
    received: int
    """Bytes received by each server rank"""
    sent: int
    """Bytes sent by the training rank that sends most, where replicas share evenly"""

    @property
    def busiest(self) -> int:
        return max(self.sent, self.received)


def estimate_transfer(
    job: RoleJob, stages: Sequence[StageMemory], rollout: RolloutConfig, server_weights: int
) -> Transfer:
    """job: the policy's. server_weights: bytes of a server rank. With rollout.file nothing is sent."""
    if rollout.file is not None:
        return Transfer(0, 0, 0)
    size, (replicas, expert_replicas) = ELEMENT_BYTES[rollout.dtype], count_replicas(job)
    sent = max(stage.parameters.dense / replicas + stage.parameters.experts / expert_replicas for stage in stages)
    num_ranks = rollout.num_servers * rollout.tp
    return Transfer(num_ranks * server_weights, server_weights, int(sent * size * rollout.num_servers))


def compute_sync_seconds(config: Config, transfer: Transfer) -> float:
    """Seconds of a sync by its busiest port, over the network or, on a single node, NVLink. With transport=disk the
    policy's nodes write the checkpoint together and then each node with a server reads all of it, once.
    """
    hardware, cluster = config.cluster.hardware, config.cluster
    if config.rollout.transport is Transport.disk:
        size, per_node = transfer.received * config.rollout.tp, cluster.gpus_per_node
        writers = max(1, min(cluster.num_nodes, config.policy.parallel.num_processes // per_node))
        return (size / writers + size) / (hardware.disk_gb_s * 1e9)
    link = hardware.network_gb_s if cluster.num_nodes > 1 else hardware.nvlink_gb_s
    return transfer.busiest / (link * 1e9 * LINK_SHARE)
