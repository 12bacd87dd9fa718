"""What Slurm has given to a job, as its environment says it, against what the configuration asks for."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megarl.config.errors import ConfigError
from megarl.config.schema.cluster import ClusterConfig


@dataclass(frozen=True)
class Allocation:
    job_id: str
    num_nodes: int
    gpus_per_node: int
    """GPUs of the node that asks; 0: the job has none."""


def read_allocation(environment: Mapping[str, str]) -> Allocation:
    """The allocation of the job that this process belongs to.

    GPUs are counted by SLURM_GPUS_ON_NODE, else by the numbers in SLURM_JOB_GPUS, else by what was asked for in
    SLURM_GPUS_PER_NODE (srun(1), sbatch(1), "OUTPUT ENVIRONMENT VARIABLES"). Raises ConfigError naming the variable.
    """
    job_id = environment.get("SLURM_JOB_ID")
    if not job_id:
        raise ConfigError(["SLURM_JOB_ID: not set, so this is no job; sbatch slurm/train.sh starts one"])
    nodes = environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES") or ""
    if not nodes.isdecimal() or int(nodes) < 1:
        raise ConfigError([f"SLURM_JOB_NUM_NODES: found {nodes!r}; it must be the number of the job's nodes"])
    return Allocation(job_id, int(nodes), _count_gpus(environment))


def _count_gpus(environment: Mapping[str, str]) -> int:
    readers = (
        ("SLURM_GPUS_ON_NODE", count_by_type),
        ("SLURM_JOB_GPUS", count_numbers),
        ("SLURM_GPUS_PER_NODE", count_by_type),
    )
    for name, read in readers:
        text = environment.get(name)
        if text:
            try:
                return read(text)
            except ValueError as error:
                raise ConfigError([f"{name}: found {text!r}; {error}"]) from None
    return 0


def count_by_type(text: str) -> int:
    """8, h100:8, a100:4,h100:4 and 8(x2), which is 8 on each of two nodes: the GPUs of one node."""
    total = 0
    for part in text.split(","):
        match = re.fullmatch(r"(?:gpu:)?(?:[^:(),]+:)?(\d+)(?:\(x\d+\))?", part.strip())
        if not match:
            raise ValueError("it must be a number of GPUs, as 8 or h100:8")
        total += int(match[1])
    return total


def count_numbers(text: str) -> int:
    """0,1,2,3 or 0-3: how many numbers these are."""
    total = 0
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not match:
            raise ValueError("it must be the numbers of GPUs, as 0,1 or 0-7")
        total += int(match[2] or match[1]) - int(match[1]) + 1
    return total


def is_restarted(environment: Mapping[str, str]) -> bool:
    """Whether this process belongs to a job that Slurm has requeued, that is to its second start or a later one."""
    return environment.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def check_allocation(cluster: ClusterConfig, allocation: Allocation) -> Iterator[str]:
    """Why the job cannot have what the configuration asks for, one message each."""
    if cluster.num_nodes > allocation.num_nodes:
        yield (
            f"cluster.num_nodes: found {cluster.num_nodes}; job {allocation.job_id} has {allocation.num_nodes}:"
            f" sbatch --nodes={cluster.num_nodes}"
        )
    # Without any GPU the key says how many processes a node may have.
    if 0 < allocation.gpus_per_node < cluster.gpus_per_node:
        yield (
            f"cluster.gpus_per_node: found {cluster.gpus_per_node}; job {allocation.job_id} has"
            f" {allocation.gpus_per_node} on a node: sbatch --gpus-per-node={cluster.gpus_per_node}"
        )
