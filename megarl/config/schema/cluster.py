"""The `cluster` group: where the processes run."""

from dataclasses import dataclass, field
from enum import Enum

from megarl.config.schema.hardware import HardwareConfig

AUTO = "auto"
"""Value of listen_host: the address by which a process's node is known to the others; of ray_address: RAY_ADDRESS."""


class Placement(Enum):
    """Which of policy, critic, reference and servers share GPUs."""

    colocated = "colocated"
    """All of them; each uses GPUs from the first GPU of the first node on"""
    split = "split"
    """Policy, critic and reference share GPUs; the servers use the GPUs after those"""
    apart = "apart"
    """None of them"""


@dataclass
class ClusterConfig:
    cpu_threads_per_worker: int | None = None
    """CPU threads of each training process; without effect on a GPU. null: the cores that the run may use (no more than
    the environment's OMP_NUM_THREADS), shared by those that work at the same time: policy and critic, and the servers
    with rollout.max_staleness above 0. A resumed run keeps the number."""
    object_store_mb: int = 256
    """Shared memory of Ray's object store on each node, in MiB; the samples of an iteration pass through it."""
    worker_start_deadline_s: float = 300.0
    """Deadline in seconds for the training processes to start and load the model."""
    call_deadline_s: float = 1800.0
    """Deadline in seconds of one call to a training process (log-probs, values, an update, an export)."""
    shutdown_deadline_s: float = 15.0
    """Deadline in seconds for all processes together to end; then they are killed."""
    ray_deadline_s: float = 120.0
    """Deadline in seconds for Ray itself to answer; the run ends where one of its processes is stopped for as long."""
    listen_host: str = "127.0.0.1"
    """Address on which servers and process groups listen; auto: the address of each one's node,
    which several nodes need."""
    num_nodes: int = 1
    """Number of nodes."""
    gpus_per_node: int = 0
    """GPUs of each node; 0: GPUs are not counted, and every process sees all of them."""
    placement: Placement = Placement.apart
    """Which of policy, critic, reference and servers share GPUs; only where gpus_per_node is above 0."""
    ray_address: str | None = None
    """HOST:PORT of a running Ray cluster of num_nodes nodes; auto: that of the environment variable RAY_ADDRESS, as a
    job of `ray job submit` has it; null: the run starts Ray on this machine."""
    nodes_deadline_s: float = 300.0
    """Deadline in seconds for Ray to start on this machine, or for the nodes of ray_address to join."""
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    """The hardware that the planner computes a job's memory and time from before its processes start."""
