"""Bytes of a weight sync: every element that a server rank holds is sent to it once (megarl/sync/plan.py)."""

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.config.schema.rollout import RolloutConfig
from megarl.plan.activations import ELEMENT_BYTES
from megarl.plan.roles import RoleJob, StageMemory


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
    """job: the policy's. server_weights: bytes of a server rank."""
    parallel, size = job.parallel, ELEMENT_BYTES[rollout.dtype]
    expert_replicas = max(1, parallel.num_processes // (parallel.pp * parallel.ep * parallel.etp))
    sent = max(
        stage.parameters.dense / (parallel.dp * parallel.cp) + stage.parameters.experts / expert_replicas
        for stage in stages
    )
    num_ranks = rollout.num_servers * rollout.tp
    return Transfer(num_ranks * server_weights, server_weights, int(sent * size * rollout.num_servers))
