"""The optimizer of a trained role, and what leaves the GPU between the calls."""

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import megatron.core.optimizer
import torch
import torch.distributed as dist
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER, MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.config.schema.roles import LrDecay, Offload, OptimizerConfig
from megarl.mcore.checkpoints import GATHERED_ELEMENTS
from megarl.mcore.device import device, find_processor
from megarl.report.timeline import span

STATE_KEYS = ("param", "exp_avg", "exp_avg_sq")
"""What Megatron writes of each parameter: the float32 weights and Adam's two moments"""
KERNEL_KEYS = ("fused", "foreach")
"""The keys of a parameter group that choose torch's kernel, which a checkpoint does not decide"""


class SplitBuffer:
    """A flat float32 buffer in host memory as one tensor per parameter, which Megatron asks for by its range. Of slices
    of one tensor, which Megatron has instead, its writer makes copies: the host held the state twice.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        """ranges: start and end of each parameter, which do not overlap; what lies between them is padding."""
        self._ranges = sorted(ranges)
        self._numbers = {place: number for number, place in enumerate(self._ranges)}
        self._starts = [start for start, _ in self._ranges]
        self._tensors = [torch.empty(end - start, dtype=torch.float32) for start, end in self._ranges]

    def __getitem__(self, where: slice) -> Tensor:
        return self._tensors[self._numbers[where.start, where.stop]]

    def write(self, start: int, values: Tensor) -> None:
        """Put the values at `start` of the buffer, without those of padding."""
        end = start + len(values)
        number = max(0, bisect_right(self._starts, start) - 1)
        while number < len(self._ranges) and self._ranges[number][0] < end:
            own, stop = self._ranges[number]
            first, last = max(start, own), min(end, stop)
            if first < last:
                self._tensors[number][first - own : last - own] = values[first - start : last - start]
            number += 1


class ReshardableOptimizer(DistributedOptimizer):  # type: ignore[misc]
    """Takes the place of Megatron's DistributedOptimizer in `get_megatron_optimizer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.is_stub_optimizer:
            self._create_state()

    def _create_state(self) -> None:
        """What Adam creates in its first step; a save before it, of a policy whose critic is pretrained, needs it."""
        inner = self.optimizer
        self.init_state_fn(inner, self.config)
        if not HAVE_APEX_OR_TE:
            for state in inner.state.values():
                # The fused kernel reads it where the parameter is.
                state["step"] = torch.zeros((), dtype=torch.float32, device=state["exp_avg"].device)
            return
        for group in inner.param_groups:
            group.setdefault("step", 0)
        # Transformer Engine's own allocates the moments anew, beside those that are there. It need not: they are
        # float32 as the weights are, which is all that torch's makes sure of.
        inner.load_state_dict = functools.partial(torch.optim.Optimizer.load_state_dict, inner)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The stock one takes all keys of the groups from the checkpoint, which another Adam may have written, and
        leaves torch's AdamW one step tensor for all parameters, which then counts each step once for each.
        """
        before = [dict(group) for group in self.optimizer.param_groups]
        super().load_state_dict(state_dict)
        for group, own in zip(self.optimizer.param_groups, before, strict=True):
            group.update({key: value for key, value in own.items() if key in KERNEL_KEYS or key not in group})
            if HAVE_APEX_OR_TE:
                group["step"] = int(group["step"])
        for param, state in self.optimizer.state.items():
            if "step" in state:
                state["step"] = state["step"].to(param.device, torch.float32, copy=True)

    def _set_main_param_and_optimizer_states(self, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        # The stock one also looks for torch's step per parameter, which no checkpoint has.
        destination = self._get_main_param_and_optimizer_states(model_param)
        with torch.no_grad():
            for key in STATE_KEYS:
                destination[key].copy_(tensors[key])

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """For a save the data are on the first data-parallel rank alone, which writes them in any case."""
        metadata = {**(metadata or {}), "distrib_optim_fully_reshardable_mem_efficient": True}
        state: dict[str, Any] = super().sharded_state_dict(
            model_sharded_state_dict, is_loading, sharding_type, metadata
        )
        if state["param_state"] is None:
            # It would count as a difference between the ranks.
            del state["param_state"]
        return state

    def get_parameter_state_dp_zero(
        self, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False
    ) -> dict[Any, Any] | None:
        """The whole state of this rank's parameters on the first data-parallel rank, or room for it (empty_data), which
        every rank has with return_on_all_ranks.

        The stock one gathers a bucket at a time, which may be all parameters. It also leaves out the padding at the end
        of each bucket and cuts parameters at places that count it: of several buckets the later ones come out shifted.
        """
        holds = return_on_all_ranks or self.data_parallel_group.rank() == 0
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for number, ranges in enumerate(self.gbuf_ranges):
            ((dtype, shards),) = ranges.items()
            buffer, whole = self.buffers[number], {}
            if holds:
                places = [(start, end) for start, end, _ in buffer.param_index_map.values()]
                whole = {key: SplitBuffer(places) for key in STATE_KEYS}
            for bucket, shard in zip(buffer.buckets, shards, strict=True):
                for key in () if empty_data else STATE_KEYS:
                    self._gather(key, bucket, shard["param_map"], whole.get(key))
            state[number] = {dtype: whole}
        return state if holds else None

    def _gather(self, key: str, bucket: Any, param_map: Mapping[Tensor, Any], whole: SplitBuffer | None) -> None:
        """One kind of state of a bucket, of which every data-parallel rank has an equal part."""
        group = self.data_parallel_group
        size, length = group.size(), bucket.grad_data.numel() // group.size()
        own = [
            (places["gbuf_local"].start, self._get_main_param_and_optimizer_states(param)[key].detach())
            for param, places in param_map.items()
        ]
        step = max(1, GATHERED_ELEMENTS // size)
        for first in range(0, length, step):
            piece = torch.zeros(min(step, length - first), dtype=torch.float32, device=bucket.grad_data.device)
            for start, values in own:
                begin, end = max(first, start), min(first + len(piece), start + len(values))
                if begin < end:
                    piece[begin - first : end - first] = values[begin - start : end - start]
            pieces = [piece]
            if size > 1:
                pieces = [torch.empty_like(piece) for _ in range(size)] if group.rank() == 0 else []
                dist.gather(piece, pieces or None, group=group, group_dst=0)
            for rank, values in enumerate(pieces):
                assert whole is not None, "the first data-parallel rank holds the whole state"
                whole.write(bucket.offset + rank * length + first, values)


# get_megatron_optimizer makes it under this name.
megatron.core.optimizer.DistributedOptimizer = ReshardableOptimizer


def build_optimizer(
    config: OptimizerConfig, transformer: TransformerConfig, model: list[torch.nn.Module]
) -> MegatronOptimizer:
    """The optimizer of a model wrapped by `wrap_chunks`. Biases and norms are not decayed."""
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=transformer.bf16,
            params_dtype=transformer.params_dtype,
            use_distributed_optimizer=True,
            overlap_param_gather=bool(config.overlap_param_gather),
            log_num_zeros_in_grad=False,
        ),
        model,
    )
    if USING_PYTORCH_OPTIMIZER:
        for group in optimizer.param_groups:
            # torch's one-kernel AdamW: on a CPU several times as fast as its default; on a GPU without the temporaries
            # of its default there, foreach, which are as large as the shard of the weights and in no plan.
            group["fused"] = True
            group["foreach"] = False
    shown: Any = optimizer
    shown.step = span("optimizer step")(optimizer.step)
    return optimizer


def describe_adam(optimizer: MegatronOptimizer) -> str:
    """Whose Adam updates the weights: Transformer Engine's where Megatron can import it, else Apex's, else torch's."""
    part = getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer
    sources = {"transformer_engine": "Transformer Engine's fused Adam", "apex": "Apex's fused Adam"}
    own = "torch's fused AdamW" if part.param_groups[0].get("fused") else "torch's AdamW"
    return sources.get(type(part).__module__.split(".")[0], own)


def build_scheduler(config: OptimizerConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The schedule; `step(1)` comes before each optimizer step: a warm-up's first step has a rate above 0.

    Raises ValueError where decay needs `decay_steps` beyond the warm-up and does not have it.
    """
    constant = config.decay is LrDecay.constant
    decay_steps = config.decay_steps if not constant else config.warmup_steps + 1
    if decay_steps is None or decay_steps <= config.warmup_steps:
        raise ValueError(
            f"optimizer.decay={config.decay.value} needs optimizer.decay_steps greater than "
            f"optimizer.warmup_steps={config.warmup_steps}; found {config.decay_steps}"
        )
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=min(config.min_lr, config.lr),
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=config.decay.value,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
    )


PIECE_BYTES = 1 << 28
"""Host memory is taken in pieces of this size"""


def find_storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """The distinct storages of the tensors on this process's device, by address of the storage object; on a CPU without
    those that numpy once shared, which torch does not resize.
    """
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device == device())
    return {storage._cdata: storage for storage in storages if storage.resizable()}


def list_optimizer_tensors(optimizer: MegatronOptimizer | None) -> Iterator[Tensor]:
    """Master weights and state; with float32 weights the former are views on the weights themselves."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        if inner is None:
            continue
        yield from (param for group in inner.param_groups for param in group["params"])
        yield from (value for state in inner.state.values() for value in state.values() if torch.is_tensor(value))


def list_gradient_buffers(chunks: Sequence[Any]) -> Iterator[Tensor]:
    """The flat gradient buffers of DistributedDataParallel models; none of models that are not trained."""
    for chunk in chunks:
        # On other modules `buffers` is torch's method.
        own = chunk.buffers if isinstance(chunk.buffers, list) else []
        yield from (buffer.grad_data for buffer in [*getattr(chunk, "expert_parallel_buffers", ()), *own])


def drop_fp8_weights(models: Iterable[torch.nn.Module]) -> None:
    """Drop the FP8 copies of the weights that Transformer Engine keeps between micro-batches: the first micro-batch of
    the next call casts them again in any case (transformer_engine/pytorch/module/base.py, quantize_weight).
    """
    for model in models:
        for module in model.modules():
            getattr(module, "_fp8_workspaces", {}).clear()


class StorageOffloader:
    """Storages whose bytes are in host memory, and that memory, which is kept: pinning it is slow."""

    def __init__(self, keep: bool = True) -> None:
        """keep: whether the bytes are needed again; without it they come back as zeros."""
        self.keep = keep
        self._hosts: list[Tensor] = []
        self._parked: list[tuple[torch.UntypedStorage, int]] = []

    def park(self, storages: dict[int, torch.UntypedStorage], *, is_changed: bool = True) -> None:
        """Move the storages to the host; they have 0 bytes then. Does nothing while others are parked here. is_changed:
        whether the host's copy of when the same ones were parked last is theirs no more.
        """
        if self._parked:
            return
        parked = [(storage, storage.nbytes()) for storage in storages.values()]
        if self.keep and is_changed:
            # In pieces of a power of two: torch rounds pinned memory up to the next one, which for whole storages may
            # be nearly twice their size (ATen/core/CachingHostAllocator.h).
            missing = sum(size for _, size in parked) - sum(host.numel() for host in self._hosts)
            for piece in (min(PIECE_BYTES, missing - start) for start in range(0, missing, PIECE_BYTES)):
                self._hosts.append(torch.empty(piece, dtype=torch.uint8, pin_memory=find_processor().pins_memory))
            for content, host in self._pair(parked):
                host.copy_(content, non_blocking=True)
        find_processor().synchronize()
        self._parked = parked
        for storage, _ in parked:
            storage.resize_(0)

    def bring(self) -> None:
        """Move everything back that is here."""
        if not self._parked:
            return
        for storage, size in self._parked:
            storage.resize_(size)
            if not self.keep:
                _as_bytes(storage).zero_()
        if self.keep:
            for content, host in self._pair(self._parked):
                content.copy_(host, non_blocking=True)
        find_processor().synchronize()
        self._parked = []

    def _pair(self, parked: Sequence[tuple[torch.UntypedStorage, int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """The bytes of the storages, one after the other, with their places in host memory."""
        hosts, room = iter(self._hosts), torch.empty(0, dtype=torch.uint8)
        for storage, _ in parked:
            content = _as_bytes(storage)
            while len(content):
                if not len(room):
                    room = next(hosts)
                size = min(len(content), len(room))
                yield content[:size], room[:size]
                content, room = content[size:], room[size:]


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class OffloadManager:
    """Keeps a worker on the device while a verb that needs it runs, and between the verbs what `offload` leaves."""

    def __init__(
        self,
        offload: Offload | None,
        models: Sequence[torch.nn.Module],
        chunks: Sequence[Any],
        optimizer: MegatronOptimizer | None,
    ) -> None:
        """models: whose parameters and buffers are the weights. chunks: the same as DistributedDataParallel."""
        self.offload = offload
        self._models, self._chunks, self._optimizer = models, chunks, optimizer
        self._weights, self._training = StorageOffloader(), StorageOffloader()
        self._gradients = StorageOffloader(keep=False)
        self.is_changed = True
        """Whether the weights are others than in host memory; a verb that changes them without `training` sets it"""
        self.leave()

    @contextmanager
    def during(self, training: bool) -> Iterator[None]:
        """Weights, and with `training` also optimizer and gradients, are on the device inside."""
        self._weights.bring()
        if training:
            self.is_changed = True
            self._training.bring()
            self._gradients.bring()
        yield
        # Not after an error: to leave waits for the device, which may wait for lost ranks. A next call brings the rest.
        self.leave()

    def leave(self) -> None:
        """Move away what `offload` names."""
        if self.offload is None:
            return
        weights = find_storages(x for model in self._models for x in (*model.parameters(), *model.buffers()))
        training = find_storages(list_optimizer_tensors(self._optimizer))
        self._training.park({key: storage for key, storage in training.items() if key not in weights})
        self._gradients.park(find_storages(list_gradient_buffers(self._chunks)))
        if self.offload is Offload.all:
            self._weights.park(weights, is_changed=self.is_changed)
            self.is_changed = False
        drop_fp8_weights(self._models)
        find_processor().give_back()


def _on_device(verb: Callable[..., Any], training: bool) -> Callable[..., Any]:
    @functools.wraps(verb)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.offload.during(training):
            return verb(self, *args, **kwargs)

    return call


uses_weights = functools.partial(_on_device, training=False)
"""Of a verb of a worker: its weights are on the device."""
uses_everything = functools.partial(_on_device, training=True)
"""Of a verb of a worker: its weights, optimizer and gradients are on the device."""
