"""Training state (parameters, optimizer, schedule) in Megatron's dist_checkpointing, for any later layout."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarl.mcore.model import PackedGPT

# The only format whose optimizer state can change its tensor- and pipeline-parallel layout.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def _sharded(
    chunks: Sequence[PackedGPT],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    *,
    is_loading: bool,
) -> ShardedStateDict:
    # A copy: Megatron adds process groups to it.
    metadata = dict(_METADATA)
    state: dict[str, Any] = {
        "model": {str(number): chunk.sharded_state_dict(metadata=metadata) for number, chunk in enumerate(chunks)}
    }
    if optimizer is not None and scheduler is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=is_loading, metadata=metadata)
        state["scheduler"] = scheduler.state_dict()
    return state


def save_state(
    directory: Path,
    chunks: Sequence[PackedGPT],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
) -> None:
    """Write to `directory`, created if need be. Every rank must call it."""
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = _sharded(chunks, optimizer, scheduler, is_loading=False)
    dist_checkpointing.save(state, str(directory), content_metadata=dict(_METADATA))


def load_state(
    directory: Path,
    chunks: Sequence[PackedGPT],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
) -> None:
    """Read what `save_state` wrote, under any layout. Every rank must call it.

    Raises FileNotFoundError where `directory` holds no checkpoint.
    """
    if not (directory / "metadata.json").is_file():
        raise FileNotFoundError(f"{directory}: no training state (metadata.json is missing)")
    state = dist_checkpointing.load(_sharded(chunks, optimizer, scheduler, is_loading=True), str(directory))
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(state["model"][str(number)])
    if optimizer is not None and scheduler is not None:
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
