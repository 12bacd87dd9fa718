"""Which processes share a GPU, and the memory of each GPU in each phase of an iteration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.config.placement import SERVERS, list_groups, place
from megarl.config.schema.rollout import ServerOffload
from megarl.config.schema.root import Config
from megarl.plan.assumptions import ALLOCATOR_SHARE, GIB, PROCESS_GIB
from megarl.plan.roles import RoleJob, StageMemory
from megarl.plan.serving import ServerMemory

PHASES = ("generation", "sync", "log-probs, values", "update", "checkpoint")


@dataclass(frozen=True)
class Tenant:
    """A training process on a GPU."""

    role: str
    stage: int


@dataclass(frozen=True)
class GpuKind:
    """GPUs with the same processes."""

    gpus: tuple[int, ...]
    """Their numbers, from 0 on the first node"""
    tenants: tuple[Tenant, ...]
    has_server: bool


def place_job(config: Config) -> dict[str, tuple[int, ...]]:
    """The GPU of every rank of each role and of the servers, in the order policy, critic, reference, servers.

    Numbers beyond the cluster's mean that the job needs more GPUs than it has. cluster.gpus_per_node must be known.
    """
    per_node = config.cluster.gpus_per_node
    return {
        name: tuple(slot.node * per_node + gpu for slot in slots for gpu in slot.gpus)
        for name, slots in place(config.cluster, list_groups(config)).items()
    }


def count_gpus(places: Mapping[str, Sequence[int]]) -> int:
    """The number of GPUs that are used."""
    return len({gpu for gpus in places.values() for gpu in gpus})


def list_kinds(places: Mapping[str, Sequence[int]], jobs: Mapping[str, RoleJob]) -> tuple[GpuKind, ...]:
    """The GPUs that are used, grouped by their tenants."""
    tenants: dict[int, list[Tenant]] = {}
    for role, job in jobs.items():
        per_stage = job.parallel.num_processes // job.parallel.pp
        for rank, gpu in enumerate(places[role]):
            tenants.setdefault(gpu, []).append(Tenant(role, rank // per_stage))
    served = set(places[SERVERS])
    kinds: dict[tuple[tuple[Tenant, ...], bool], list[int]] = {}
    for gpu in sorted(tenants.keys() | served):
        kinds.setdefault((tuple(tenants.get(gpu, ())), gpu in served), []).append(gpu)
    return tuple(GpuKind(tuple(gpus), *key) for key, gpus in kinds.items())


@dataclass(frozen=True)
class Sharing:
    """How the processes of a GPU share it."""

    takes_turns: bool
    """Roles compute one after the other (megarl/cluster/turns.py)"""
    offload: ServerOffload | None
    """What servers have given back while roles compute (megarl/rollout/offload.py)"""


def compute_phases(
    kind: GpuKind,
    jobs: Mapping[str, RoleJob],
    stages: Mapping[str, Sequence[StageMemory]],
    server: ServerMemory | None,
    bucket_bytes: int,
    sharing: Sharing,
) -> dict[str, int]:
    """Bytes of one GPU in each phase, by PHASES. Roles that share it compute in parallel, or take turns.

    bucket_bytes: rollout.sync_bucket_mb; a rank of a sync holds at most two messages.
    """
    is_shared = kind.has_server or len(kind.tenants) > 1
    held, scoring, updating, saving, sending = [], [], [], [], []
    for tenant in kind.tenants:
        memory = stages[tenant.role][tenant.stage]
        least = hold(memory, jobs[tenant.role], is_shared)
        is_sender = tenant.role == "policy"
        held.append(add_overhead(least))
        sending.append(add_overhead(max(least, memory.weights) + 2 * bucket_bytes if is_sender else least))
        scoring.append(add_overhead(max(least, memory.forward)))
        # The model was built before the first update, and the allocator keeps what that took.
        updating.append(add_overhead(max(least, memory.update, memory.building)))
        saving.append(add_overhead(max(least, memory.checkpoint)))
    served = server if kind.has_server else None
    away = served.compute_rest(sharing.offload) if served else 0
    return {
        "generation": sum(held) + (served.total if served else 0),
        "sync": sum(sending) + (served.compute_loading(sharing.offload) + 2 * bucket_bytes if served else 0),
        "log-probs, values": _join(scoring, held, sharing.takes_turns) + away,
        "update": _join(updating, held, sharing.takes_turns) + away,
        "checkpoint": _join(saving, held, sharing.takes_turns) + away,
    }


def _join(working: Sequence[int], held: Sequence[int], takes_turns: bool) -> int:
    """Bytes of all roles on a GPU at their peak. working: of each that computes. held: of each that waits."""
    if not takes_turns:
        return sum(working)
    return sum(held) + max((work - least for work, least in zip(working, held, strict=True)), default=0)


def hold(memory: StageMemory, job: RoleJob, is_shared: bool) -> int:
    """Bytes of a training process between its calls.

    torch's allocator keeps the peak of the calls, which others on the GPU cannot use; where something is offloaded,
    it releases that memory (megarl/mcore/offload.py).
    """
    return memory.peak if is_shared and job.offload is None else memory.resident


def add_overhead(tensors: int) -> int:
    return int(tensors * (1 + ALLOCATOR_SHARE) + PROCESS_GIB * GIB)


def compute_free(kind: GpuKind, stages: Mapping[str, Sequence[StageMemory]], gpu_bytes: int) -> int:
    """Bytes of a GPU that are free when its server starts: the training processes hold their models then."""
    taken = sum(add_overhead(stages[tenant.role][tenant.stage].resident) for tenant in kind.tenants)
    return max(0, gpu_bytes - taken)
