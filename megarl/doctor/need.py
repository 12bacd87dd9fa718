"""The needs of the chosen configuration on the machine that it runs on."""

from collections.abc import Sequence

from megarl.algo.registry import needs_critic
from megarl.config.placement import list_groups, place
from megarl.config.schema.root import Config
from megarl.doctor.facts import Need

CLUSTERS_OF_ANY_NODES = ("laptop", "slurm")
"""Options of the cluster group that also run on nodes without GPUs"""


def find_need(config: Config, overrides: Sequence[str], assumed: Sequence[str] = ()) -> Need:
    """The needs of `config`, composed from these overrides and those assumed of a Slurm job."""
    cluster = find_choice(overrides, "cluster")
    roles = {"policy": config.policy, **({"critic": config.critic} if needs_critic(config.algo) else {})}
    fp8 = tuple((name, role.fp8.value, role.fp8_recipe.value) for name, role in roles.items() if role.fp8)
    hardware = config.cluster.hardware
    cuda = [f"cluster.hardware.gpu={hardware.gpu}"] if hardware.gpu is not None else []
    if cluster is not None and cluster not in CLUSTERS_OF_ANY_NODES:
        cuda = [f"cluster={cluster}"]
    cuda += [f"{name}.fp8={kind}" for name, kind, _ in fp8]
    if config.rollout.kv_cache_tokens is None and config.rollout.file is None:
        cuda.append("rollout.kv_cache_tokens=null")
    return Need(
        cluster=cluster,
        cuda=tuple(cuda),
        num_gpus=count_gpus(config) if cuda else 0,
        num_nodes=config.cluster.num_nodes,
        fp8=fp8,
        gpu=hardware.gpu,
        gpu_memory_gb=hardware.memory_gib * 2**30 / 1e9,
        object_store_gb=config.cluster.object_store_mb * 2**20 / 1e9,
        assumed=tuple(assumed),
    )


def count_gpus(config: Config) -> int:
    """The largest number of GPUs that the job uses on one node; all, on one node, where they are not counted."""
    groups = list_groups(config)
    if config.cluster.gpus_per_node == 0:
        return sum(group.num_gpus for group in groups)
    used = {(slot.node, gpu) for slots in place(config.cluster, groups).values() for slot in slots for gpu in slot.gpus}
    nodes = [node for node, _ in used]
    return max((nodes.count(node) for node in set(nodes)), default=0)


def find_choice(overrides: Sequence[str], group: str) -> str | None:
    """The last option chosen of a group; None: none was."""
    chosen = [value for name, _, value in (text.partition("=") for text in overrides) if name == group]
    return chosen[-1] if chosen else None
