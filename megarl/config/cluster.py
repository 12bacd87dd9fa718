"""The `cluster` group: where the processes run."""

from dataclasses import dataclass


@dataclass
class ClusterConfig:
    cpu_threads_per_worker: int = 1
    """Threads of a training process on a CPU."""
    object_store_mb: int = 256
    worker_start_deadline_s: float = 300.0
    call_deadline_s: float = 1800.0
    """Deadline of one call to a training worker (log-probs, values, an update, an export)."""
    shutdown_deadline_s: float = 15.0
    listen_host: str = "127.0.0.1"
    """Address on which servers and process groups listen."""
