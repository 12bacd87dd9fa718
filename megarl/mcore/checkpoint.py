"""Training state (parameters, optimizer, schedule) in Megatron's dist_checkpointing, for any later layout."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarl.checkpoint.manifest import CheckpointError
from megarl.mcore.dist_reader import holds_optimizer, load_metadata
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

    Raises FileNotFoundError where `directory` holds no checkpoint, CheckpointError where it has no optimizer's state.
    """
    if not (directory / "metadata.json").is_file():
        raise FileNotFoundError(f"{directory}: no training state (metadata.json is missing)")
    if optimizer is not None and not holds_optimizer(directory):
        raise CheckpointError(
            f"{directory}: holds weights without an optimizer's state, so no training can continue from it;"
            " load_weights takes the weights alone"
        )
    state = dist_checkpointing.load(_sharded(chunks, optimizer, scheduler, is_loading=True), str(directory))
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(state["model"][str(number)])
    if optimizer is not None and scheduler is not None:
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])


def load_weights(directory: Path, chunks: Sequence[PackedGPT]) -> None:
    """Read the weights alone, under any layout, in the model's own dtype. Every rank must call it.

    Raises CheckpointError where `directory` holds no checkpoint, Megatron's CheckpointingException or KeyError for one
    of another model.
    """
    load_metadata(directory)
    # The extra state of a module is about FP8 scales, which weights do not come with.
    wanted = {
        str(number): {key: x for key, x in chunk.sharded_state_dict().items() if not key.endswith("_extra_state")}
        for number, chunk in enumerate(chunks)
    }
    state = dist_checkpointing.load({"model": wanted}, str(directory))
    for number, chunk in enumerate(chunks):
        missing, unexpected = chunk.load_state_dict(state["model"][str(number)], strict=False)
        problems = [key for key in missing if not key.endswith("_extra_state")] + unexpected
        if problems:
            raise CheckpointError(f"{directory}: does not hold what the model has: {', '.join(problems[:5])}")
