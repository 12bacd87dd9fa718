"""The `cluster` group: where the processes run."""

from dataclasses import dataclass, field
from enum import Enum

from megarl.config.schema.hardware import HardwareConfig

AUTO = "auto"
"""Value of listen_host: the address by which a process's node is known to the others."""


class Placement(Enum):
    """Which of policy, critic, reference and servers share GPUs."""

    colocated = "colocated"
    """All of them: each begins at the first GPU of the first node"""
    split = "split"
    """Policy, critic and reference share theirs; the servers have the GPUs after them"""
    apart = "apart"
    """None: each has GPUs of its own"""


@dataclass
class ClusterConfig:
    cpu_threads_per_worker: int = 1
    """CPU threads of each training process; without effect on a GPU."""
    object_store_mb: int = 256
    """Shared memory of Ray's object store on each node, in MiB; the samples of an iteration pass through it."""
    worker_start_deadline_s: float = 300.0
    """Seconds that the training processes may take to start and load the model."""
    call_deadline_s: float = 1800.0
    """Seconds that one call to a training process may take (log-probs, values, an update, an export)."""
    shutdown_deadline_s: float = 15.0
    """Seconds that all processes together may take to end before they are killed."""
    listen_host: str = "127.0.0.1"
    """Address on which servers and process groups listen; auto: each on that of its node, which several nodes need."""
    num_nodes: int = 1
    """Nodes that the processes are placed on."""
    gpus_per_node: int = 0
    """GPUs of each node; 0: GPUs are not counted, and every process sees all of them."""
    placement: Placement = Placement.apart
    """Which of policy, critic, reference and servers share GPUs; counts where gpus_per_node is above 0."""
    ray_address: str | None = None
    """HOST:PORT of a Ray that runs already, on num_nodes nodes; null: one of this machine alone, for this run."""
    nodes_deadline_s: float = 300.0
    """Seconds that the nodes of ray_address may take to join."""
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    """What a job's memory and seconds are planned from, before its processes start."""
