"""The nodes of a running Ray, and the placement of a run's processes on them."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.gpus import Gpu, build_variables, choose_gpus, find_gpus
from megarl.cluster.ray_calls import ask
from megarl.cluster.waiting import wait_for
from megarl.config.placement import DeviceSlot, format_numbers
from megarl.interfaces import DeadlineError

ORDER_VARIABLE = "MEGARL_NODES"
"""Environment variable: names of the nodes, separated by commas, in the order in which they are filled"""
POLL_S = 0.5


@dataclass(frozen=True)
class Node:
    name: str
    node_id: str
    """Ray's id of the node"""
    gpus: tuple[Gpu, ...] = ()
    """The job's GPUs there, in the order of their numbers; empty: GPUs are not counted"""

    @property
    def place(self) -> NodeAffinitySchedulingStrategy:
        return NodeAffinitySchedulingStrategy(self.node_id, soft=False)


@dataclass(frozen=True)
class Cluster:
    """Ray as a run uses it."""

    nodes: tuple[Node, ...]
    scratch: Path
    """A folder of this run on the driver's machine"""
    host: str
    """The address on which the driver listens"""
    listen_host: str
    """`cluster.listen_host`; each process resolves `auto` for itself"""

    def options(self, slot: DeviceSlot, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Ray's options for an actor in this slot, whose process is started with the environment of its GPUs.

        variables: further environment variables.
        """
        chosen = build_variables(self.find_gpus(slot)) if slot.gpus else {}
        environment = chosen | dict(variables or {})
        placed = {"scheduling_strategy": self.nodes[slot.node].place}
        return placed | ({"runtime_env": {"env_vars": environment}} if environment else {})

    def find_gpus(self, slot: DeviceSlot) -> tuple[Gpu, ...]:
        return tuple(self.nodes[slot.node].gpus[number] for number in slot.gpus)

    def describe(self, slots: Sequence[DeviceSlot]) -> str:
        """The nodes and GPUs of these slots, as `n1 GPU 0-3; n2 GPU 0`; empty where GPUs are not counted."""
        parts: dict[str, list[int]] = {}
        for slot in slots:
            parts.setdefault(self.nodes[slot.node].name, []).extend(slot.gpus)
        return "; ".join(f"{node} GPU {format_numbers(gpus)}" for node, gpus in parts.items() if gpus)


def wait_for_nodes(number: int, deadline_s: float) -> tuple[Node, ...]:
    """The nodes of Ray in the order of MEGARL_NODES, else this machine first and the others by name.

    Raises DeadlineError naming those that have joined, where they are fewer than `number` at the deadline; RayLostError
    where Ray does not answer.
    """
    end = time.monotonic() + deadline_s
    while True:
        alive = {each["NodeID"]: each["NodeName"] for each in ask("its nodes", ray.nodes) if each["Alive"]}
        if len(alive) >= number:
            break
        if time.monotonic() > end:
            raise DeadlineError(
                f"{len(alive)} of {number} nodes (cluster.num_nodes) have joined Ray within {deadline_s:g} s"
                f" (cluster.nodes_deadline_s): {', '.join(sorted(alive.values())) or 'none'}"
            )
        time.sleep(POLL_S)
    order = os.environ.get(ORDER_VARIABLE, "").split(",")
    own = ask("this node", lambda: ray.get_runtime_context().get_node_id())

    def rank(item: tuple[str, str]) -> tuple[int, bool, str]:
        node_id, name = item
        return (order.index(name) if name in order else len(order), node_id != own, name)

    return tuple(Node(name, node_id) for node_id, name in sorted(alive.items(), key=rank))


def count_gpus(nodes: Sequence[Node], number: int, deadline_s: float) -> tuple[Node, ...]:
    """These nodes, each with `number` GPUs of the job. A process of Ray on each says which the job has there.

    Raises ConfigError where a node has fewer, DeadlineError where one does not answer.
    """
    what = "the GPUs of the nodes"
    task = ray.remote(num_cpus=0, max_retries=0)(find_gpus)
    refs = ask(what, lambda: [task.options(scheduling_strategy=node.place).remote() for node in nodes])
    found = wait_for(refs, [node.name for node in nodes], what, deadline_s)
    return tuple(
        replace(node, gpus=choose_gpus(node.name, each, number)) for node, each in zip(nodes, found, strict=True)
    )
