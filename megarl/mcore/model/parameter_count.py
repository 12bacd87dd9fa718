"""The parameters of each rank of a layout, counted in Megatron's own model without its memory or its processes.

The model is built on torch's meta device, whose tensors have shapes and no bytes, by one process that plays a rank of
each pipeline stage in turn: torch.distributed's backend `fake` makes a group of any size of it, which says at once
that every collective is done (torch.testing._internal.distributed.fake_pg).
"""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.config.schema.roles import Dtype, ParallelConfig
from megarl.mcore import process_groups
from megarl.mcore.model.architecture import Architecture
from megarl.mcore.model.build import build_chunks, build_config
from megarl.mcore.model.trainable import is_mlp
from megarl.mcore.worker_spec import StageParameters


class _Meta(TorchFunctionMode):
    """Puts on the meta device also what asks for a GPU, and leaves there what is to move. What asks for the CPU may
    have it: a few rotary frequencies.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return args[0]
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def count_stages(
    arch: Architecture, parallel: ParallelConfig, dtype: Dtype, megatron: dict[str, Any], with_value_head: bool
) -> tuple[StageParameters, ...]:
    """The parameters of a rank of each pipeline stage.

    megatron: model.megatron. Raises ValueError for a layout that does not fit the model, RuntimeError in a process
    that has joined a process group.
    """
    per_stage = parallel.num_processes // parallel.pp
    return tuple(
        _count_rank(arch, parallel, dtype, megatron, with_value_head, stage * per_stage) for stage in range(parallel.pp)
    )


def _count_rank(
    arch: Architecture,
    parallel: ParallelConfig,
    dtype: Dtype,
    megatron: dict[str, Any],
    with_value_head: bool,
    rank: int,
) -> StageParameters:
    with _playing(rank, parallel):
        config = build_config(arch, parallel, dtype, megatron, {"init_model_with_meta_device": True})
        with torch.device("meta"), _Meta():
            chunks = build_chunks(arch, config, with_value_head)
        named = [item for chunk in chunks for item in chunk.named_parameters()]

    def count(*marks: str) -> int:
        return sum(param.numel() for name, param in named if any(mark in name for mark in marks))

    experts = count(".mlp.experts.")
    return StageParameters(
        num_layers=sum(len(chunk.decoder.layers) for chunk in chunks),
        dense=sum(param.numel() for _, param in named) - experts,
        experts=experts,
        embedding=count("embedding.word_embeddings."),
        head=count("output_layer."),
        mlp=sum(param.numel() for name, param in named if is_mlp(name) and ".mlp.experts." not in name),
    )


@contextmanager
def _playing(rank: int, parallel: ParallelConfig) -> Iterator[None]:
    """Play rank `rank` of `parallel.num_processes`."""
    if dist.is_initialized():
        raise RuntimeError("the parameters of a layout are counted in a process that has joined no process group")
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        # Megatron asks for the current GPU in order to put tensors on it, and with context parallelism for a stream;
        # torch would set up the first GPU for either, whose memory the driver then held during the run.
        stack.enter_context(patch.object(torch.cuda, "current_device", lambda: 0))
        stack.enter_context(patch.object(torch.cuda, "Stream", lambda *args, **kwargs: None))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.num_processes)
        try:
            process_groups.initialize_groups(parallel, create_gloo_process_groups=False)
            yield
        finally:
            process_groups.destroy()
