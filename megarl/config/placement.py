"""Which GPU of which node each process has, by the `cluster` group, and what Slurm has given to a job."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megarl.algo.objective import needs_critic
from megarl.config.errors import ConfigError
from megarl.config.schema.algo import needs_reference
from megarl.config.schema.roles import ParallelConfig
from megarl.config.schema.root import AUTO, SERVERS, ClusterConfig, Config, Placement, ServerOffload, Transport

CONTRADICTIONS = ("rollout.transport", "cluster.listen_host", "cluster.gpus_per_node", "cluster.num_nodes")
"""Keys of problems that more GPUs would not solve."""
HOST_AND_PORT = r"[^/]+:\d+"
RAY_ADDRESS = "RAY_ADDRESS"
"""Environment variable: HOST:PORT of the Ray that a job of `ray job submit`, or a container of KubeRay, is in"""


@dataclass(frozen=True)
class DeviceSlot:
    """Where one process runs."""

    node: int = 0
    gpus: tuple[int, ...] = ()
    """Numbers of its GPUs on that node; empty: GPUs are not counted."""


@dataclass(frozen=True)
class Group:
    """Processes that get their GPUs together."""

    name: str
    """Name of a role, or `servers`."""
    num_processes: int
    gpus_per_process: int
    unit: int
    """GPUs in a row that are kept within one node, where a node has as many."""

    @property
    def num_gpus(self) -> int:
        return self.num_processes * self.gpus_per_process


def list_layouts(config: Config) -> dict[str, ParallelConfig]:
    """That of each role that the algorithm needs."""
    roles = {"policy": config.policy.parallel}
    if needs_critic(config.algo):
        roles["critic"] = config.critic.parallel
    if needs_reference(config.algo):
        roles["reference"] = config.reference.parallel
    return roles


def list_groups(config: Config, command: str = "train") -> list[Group]:
    """What `python -m megarl.COMMAND` starts: the roles that the algorithm needs, then the servers, 0 where it learns
    from a file.
    """
    tp = config.rollout.tp
    servers = Group(SERVERS, config.rollout.num_servers, tp, tp)
    if command == "evaluate":
        return [servers]
    if not config.has_servers:
        servers = Group(SERVERS, 0, 1, 1)
    roles = {"critic": config.critic.parallel} if config.has_critic_alone else list_layouts(config)
    return [*(Group(name, each.num_processes, 1, each.tp) for name, each in roles.items()), servers]


def count_gpus(config: Config, command: str = "train") -> dict[str, int]:
    """The GPUs of each group; without a GPU, its processes that work at the same time."""
    return {group.name: group.num_gpus for group in list_groups(config, command)}


def place(cluster: ClusterConfig, groups: Sequence[Group]) -> dict[str, tuple[DeviceSlot, ...]]:
    """The slots of each group's processes, in the order of their ranks; nodes may be more than cluster.num_nodes."""
    per_node = cluster.gpus_per_node
    if per_node == 0:
        return {group.name: (DeviceSlot(),) * group.num_processes for group in groups}
    slots: dict[str, tuple[DeviceSlot, ...]] = {}
    first = end = 0
    for group in groups:
        splits = cluster.placement is Placement.split and group.name == SERVERS and len(groups) > 1
        first = end if splits or cluster.placement is Placement.apart else first
        numbers: list[int] = []  # of GPUs, counted over the nodes
        position = first
        for start in range(0, group.num_gpus, group.unit):
            size = min(group.unit, group.num_gpus - start)
            left = per_node - position % per_node
            if left < size <= per_node:  # what would cross into the next node begins there
                position += left
            numbers.extend(range(position, position + size))
            position += size
        size = group.gpus_per_process
        parts = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        slots[group.name] = tuple(DeviceSlot(part[0] // per_node, tuple(n % per_node for n in part)) for part in parts)
        end = max([end, *(number + 1 for number in numbers)])
    return slots


def format_numbers(numbers: Sequence[int]) -> str:
    """`0-3, 6`"""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def is_sharing(slots: Mapping[str, Sequence[DeviceSlot]]) -> bool:
    """Whether a server has a GPU that a role's process has too; False where GPUs are not counted."""
    taken = {name: {(slot.node, gpu) for slot in group for gpu in slot.gpus} for name, group in slots.items()}
    roles = set().union(*(gpus for name, gpus in taken.items() if name != SERVERS))
    return not roles.isdisjoint(taken.get(SERVERS, set()))


def find_server_offload(config: Config) -> ServerOffload | None:
    """rollout.offload where it has an effect: where servers share GPUs with roles, or GPUs are not counted."""
    if not config.has_servers:
        return None
    slots = place(config.cluster, list_groups(config))
    has_gpus = any(slot.gpus for slot in slots[SERVERS])
    return None if has_gpus and not is_sharing(slots) else config.rollout.offload


def take_turns(config: Config) -> bool:
    """Whether the roles compute one after the other: they share GPUs, and turns save memory, as one is offloaded."""
    slots = place(config.cluster, list_groups(config))
    roles = [name for name in slots if name != SERVERS]
    taken = [{(slot.node, gpu) for slot in slots[name] for gpu in slot.gpus} for name in roles]
    are_apart = sum(map(len, taken)) == len(set().union(*taken))
    return not are_apart and any(getattr(config, name).offload is not None for name in roles)


def count_nodes(slots: Mapping[str, Sequence[DeviceSlot]]) -> int:
    """Nodes that are used, or lie before one that is."""
    return 1 + max((each.node for group in slots.values() for each in group), default=0)


def check_cluster(config: Config, command: str = "train") -> Iterator[str]:
    """Why the job cannot run on the cluster of its configuration, one message each."""
    cluster, groups, nodes = config.cluster, list_groups(config, command), config.cluster.num_nodes
    if nodes > 1 and cluster.ray_address is None:
        yield (
            f"cluster.ray_address: found null with cluster.num_nodes {nodes}; without a Ray that spans the nodes a job"
            " has this machine alone: sbatch slurm/train.sh starts one (cluster=slurm), or cluster.num_nodes=1"
        )
    if nodes > 1 and cluster.listen_host in ("127.0.0.1", "localhost", "::1"):
        found = f"found {cluster.listen_host} with cluster.num_nodes {nodes}"
        yield f"cluster.listen_host: {found}, whose processes do not reach it; auto does"
    if nodes > 1 and cluster.gpus_per_node < 1:
        # Processes are placed by counting: GPUs, or how many each node without GPUs may have.
        yield f"cluster.gpus_per_node: found {cluster.gpus_per_node}; it must be 1 or more"
        return
    if cluster.ray_address is not None and not re.fullmatch(rf"{AUTO}|{HOST_AND_PORT}", cluster.ray_address):
        yield (
            f"cluster.ray_address: found {cluster.ray_address!r}; it must be HOST:PORT, {AUTO} for the environment's"
            f" {RAY_ADDRESS}, or null for a Ray of this run"
        )
    slots, per_node = place(cluster, groups), cluster.gpus_per_node
    if config.rollout.tp > per_node > 0:
        yield f"rollout.tp: found {config.rollout.tp}; a server is on one node, which has {per_node} GPUs"
    elif (needed := count_nodes(slots)) > nodes:
        asked = " + ".join(f"{group.name} {group.num_gpus}" for group in groups)
        yield (
            f"cluster: {asked} GPUs, placed {cluster.placement.name}, need {needed} nodes of {per_node} GPUs"
            f" (cluster.gpus_per_node); there are {nodes} (cluster.num_nodes) with {nodes * per_node} in all"
            f"{_suggest(cluster, groups)}"
        )
    syncs = command == "train" and config.has_servers and config.rollout.transport is Transport.split
    if syncs and cluster.placement is Placement.colocated and slots[SERVERS][0].gpus and cluster.hardware.gpu:
        yield (
            "rollout.transport: found split with cluster.placement=colocated, where policy and servers share GPUs: NCCL"
            " joins no two processes of one GPU; colocated, or disk"
        )


def find_ray_address(address: str) -> str:
    """The HOST:PORT that `cluster.ray_address` means here. Raises ConfigError where RAY_ADDRESS has none."""
    if address != AUTO:
        return address
    found = os.environ.get(RAY_ADDRESS, "")
    if re.fullmatch(HOST_AND_PORT, found):
        return found
    text = f"which stands for the environment variable {RAY_ADDRESS}, and that is {found or 'not set'}"
    right = "a job of `ray job submit` has the HOST:PORT there; elsewhere give it to the key"
    raise ConfigError([f"cluster.ray_address: found {AUTO}, {text}; {right}"])


def list_contradictions(config: Config) -> list[str]:
    """Keys of a training job that contradict each other, however many GPUs there are; one message each."""
    return [message for message in check_cluster(config) if message.startswith(CONTRADICTIONS)]


def _suggest(cluster: ClusterConfig, groups: Sequence[Group]) -> str:
    """Another placement that has room, the one that shares least first."""
    for other, also in ((Placement.split, ""), (Placement.colocated, " with rollout.transport=colocated")):
        tried = ClusterConfig(num_nodes=cluster.num_nodes, gpus_per_node=cluster.gpus_per_node, placement=other)
        if count_nodes(place(tried, groups)) <= cluster.num_nodes:
            has_room = "has room, where the memory suffices (`megarl plan` tells)"
            return f"; cluster.placement={other.name}{also} {has_room}"
    return "; more nodes, or smaller parallel.num_processes and rollout.num_servers"


@dataclass(frozen=True)
class Allocation:
    job_id: str
    num_nodes: int
    gpus_per_node: int
    """GPUs of the node that asks; 0: the job has none."""


def read_allocation(environment: Mapping[str, str]) -> Allocation:
    """The allocation of the job that this process belongs to, as cluster=slurm takes it. Raises ConfigError naming the
    variable.
    """
    job_id = environment.get("SLURM_JOB_ID")
    if not job_id:
        raise ConfigError(["SLURM_JOB_ID: not set, so this is no job; sbatch slurm/train.sh starts one"])
    counts = []
    for name, default, least in (("SLURM_JOB_NUM_NODES", "", 1), ("SLURM_GPUS_ON_NODE", "0", 0)):
        text = environment.get(name) or default
        if not text.isdecimal() or int(text) < least:
            raise ConfigError([f"{name}: found {text!r}; it must be a number, {least} or more"])
        counts.append(int(text))
    return Allocation(job_id, *counts)


def check_allocation(cluster: ClusterConfig, allocation: Allocation) -> Iterator[str]:
    """Why the job cannot have what the configuration asks for, one message each."""
    if cluster.num_nodes > (nodes := allocation.num_nodes):
        right = f"sbatch --nodes={cluster.num_nodes}"
        yield f"cluster.num_nodes: found {cluster.num_nodes}; job {allocation.job_id} has {nodes}: {right}"
    # Without any GPU the key says how many processes a node may have.
    if 0 < allocation.gpus_per_node < cluster.gpus_per_node:
        yield (
            f"cluster.gpus_per_node: found {cluster.gpus_per_node}; job {allocation.job_id} has"
            f" {allocation.gpus_per_node} on a node: sbatch --gpus-per-node={cluster.gpus_per_node}"
        )
