"""torch.distributed and Megatron's process groups, and metrics over them."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from megarl.config.schema.roles import ParallelConfig
from megarl.mcore.device import claim_gpu, device, find_processor


def initialize(
    parallel: ParallelConfig,
    rank: int,
    world_size: int,
    init_method: str,
    seed: int,
    deadline_s: float,
    collective_s: float | None = None,
    gpu: str | None = None,
) -> None:
    """Join the role's process group and build Megatron's groups in it.

    deadline_s: of `meet` and, where `collective_s` does not say it, of a collective.
    gpu: UUID of the GPU that this process was started for. Raises RuntimeError for a layout that does not fit and where
    this rank has another GPU or that of another rank, and torch's own errors where not all ranks come in time.
    """
    machine = find_processor()
    found = machine.take(rank, gpu)
    _meetings[:] = [0, deadline_s]
    timeout = timedelta(seconds=deadline_s)
    dist.init_process_group(machine.backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)
    if found is not None:
        # Before NCCL's first call, which would end with a message that names neither the ranks nor the key.
        claim_gpu(dist.distributed_c10d._get_default_store(), rank, found)
    initialize_groups(parallel, distributed_timeout_minutes=deadline_s / 60)
    if collective_s is not None and collective_s < deadline_s:
        # From now on: to join takes as long as the slowest process takes to start.
        for group in list(dist.distributed_c10d._world.pg_map):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=collective_s), group)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


_meetings: list[float] = [0, 0.0]
"""How many there were since this process joined, and the deadline of each in seconds"""


def meet() -> None:
    """Wait for all ranks, longer than a collective may take: what each has done before is as fast as its disk. Raises
    torch's error where they do not all come within the call's deadline.
    """
    _meetings[0] += 1
    store, name = dist.distributed_c10d._get_default_store(), f"megarl/meeting {_meetings[0]}"
    if store.add(name, 1) == dist.get_world_size():
        store.set(f"{name}: all", "")
    store.wait([f"{name}: all"], timedelta(seconds=_meetings[1]))


@contextmanager
def alone(scratch: Path) -> Iterator[None]:
    """Meanwhile this process is the only one of process groups of its own. scratch: an empty directory."""
    initialize(ParallelConfig(), 0, 1, f"file://{scratch}/init", 1, 300.0)
    try:
        yield
    finally:
        destroy()


def initialize_groups(parallel: ParallelConfig, **options: Any) -> None:
    """Megatron's groups of this layout, in a process that has joined; options: further ones of Megatron's call."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        **options,
    )


def destroy() -> None:
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def reports() -> bool:
    """Whether this rank hands its data-parallel rank's outputs to the caller."""
    is_reporter: bool = (
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )
    return is_reporter


def combine(sums: dict[str, Tensor], maxima: dict[str, Tensor]) -> dict[str, float]:
    """Sums and maxima over data-parallel ranks, from the last pipeline stage to all ranks. The ranks of a
    context-parallel group hold the same numbers: they count once. All ranks of the last stage pass the same names.
    """
    result: list[dict[str, float] | None] = [None]
    if parallel_state.is_pipeline_last_stage():
        group = parallel_state.get_data_parallel_group()
        result = [_reduce(sums, dist.ReduceOp.SUM, group) | _reduce(maxima, dist.ReduceOp.MAX, group)]
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    if pp_group.size() > 1:
        dist.broadcast_object_list(result, group=pp_group, group_src=pp_group.size() - 1, device=device())
    assert result[0] is not None
    return result[0]


def _reduce(named: dict[str, Tensor], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> dict[str, float]:
    if not named:
        return {}
    names = sorted(named)
    stacked = torch.stack([named[name].detach().double().to(device()) for name in names])
    if group.size() > 1:
        dist.all_reduce(stacked, op=op, group=group)
    return dict(zip(names, stacked.tolist(), strict=True))
