"""The optimizer of a trained role, and what leaves the GPU between the calls."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import megatron.core.optimizer
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER, MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.config.schema.roles import LrDecay, Offload, OptimizerConfig
from megarl.mcore.checkpoints import SENT_ELEMENTS
from megarl.mcore.device import device, find_processor
from megarl.report.timeline import span

STATE_KEYS = ("param", "exp_avg", "exp_avg_sq")
"""What Megatron writes of each parameter: the float32 weights and Adam's two moments"""
KERNEL_KEYS = ("fused", "foreach")
"""The keys of a parameter group that choose torch's kernel, which a checkpoint does not decide"""


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
        if "param_state_sharding_type" in state_dict:
            # A rank that keeps no parameter's state has a part in those of the others.
            state_dict = {"param_state": {}} | state_dict
        super().load_state_dict(state_dict)
        for group, own in zip(self.optimizer.param_groups, before, strict=True):
            group.update({key: value for key, value in own.items() if key in KERNEL_KEYS or key not in group})
            if HAVE_APEX_OR_TE:
                group["step"] = int(group["step"])
        for param, state in self.optimizer.state.items():
            if "step" in state:
                state["step"] = state["step"].to(param.device, torch.float32, copy=True)

    def sharded_param_state_fully_reshardable(
        self, model_sharded_state_dict: Any, is_loading: bool, metadata: dict[str, Any] | None = None
    ) -> dict[int, Any]:
        """The whole state of the parameters that this rank keeps, in host memory, or room for it (is_loading). So each
        data-parallel rank writes and reads a part of a checkpoint. With the stock one the first rank writes all of it,
        and every rank reads all of it.
        """
        tensors, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
        described = {id(each.data): each for each in nested_values(tensors)}
        state = {}
        for number, (param, keeper, parts) in enumerate(self._list_keepers()):
            is_kept = keeper == self.data_parallel_group.rank()
            wholes = {key: torch.empty(param.numel() if is_kept else 0, dtype=torch.float32) for key in STATE_KEYS}
            for key in () if is_loading else STATE_KEYS:
                self._move(key, param, keeper, parts, wholes[key], to_keeper=True)
            if is_kept:
                own = described[id(param)]
                dtype = {} if isinstance(own, ShardedTensorFactory) else {"dtype": torch.float32}
                state[number] = {
                    key: replace(
                        own,
                        key=f"optimizer.state.{key}.{own.key}",
                        data=whole.view(own.data.shape),
                        # The last of it is the data-parallel rank; what is written has 0.
                        replica_id=(*own.replica_id[:-1], 0),
                        **dtype,
                    )
                    for key, whole in wholes.items()
                }
        return state

    def load_parameter_state_from_fully_reshardable(self, state_dict: Mapping[int, Mapping[str, Tensor]]) -> None:
        """state_dict: the whole state of the parameters that this rank keeps."""
        nothing = dict.fromkeys(STATE_KEYS, torch.empty(0))
        for number, (param, keeper, parts) in enumerate(self._list_keepers()):
            for key in STATE_KEYS:
                whole = state_dict.get(number, nothing)[key].flatten()
                self._move(key, param, keeper, parts, whole, to_keeper=False)

    def _list_keepers(self) -> Iterator[tuple[Tensor, int, list[tuple[int, int, int]]]]:
        """Each parameter, the data-parallel rank that keeps its whole state for a checkpoint, and the ranks that update
        it with start and end of their parts. The largest parameters go first, each to the rank that has least.
        """
        size = self.data_parallel_group.size()
        places = [(buffer, param, *place) for buffer in self.buffers for param, place in buffer.param_index_map.items()]
        kept, keepers = [0] * size, [0] * len(places)
        for number in sorted(range(len(places)), key=lambda number: -places[number][1].numel()):
            keepers[number] = kept.index(min(kept))
            kept[keepers[number]] += places[number][1].numel()
        for keeper, (buffer, param, start, end, bucket_number) in zip(keepers, places, strict=True):
            bucket = buffer.buckets[bucket_number]
            # Every rank has an equal part of a bucket, at whose end padding may be.
            length = bucket.grad_data.numel() // size
            firsts = [bucket.offset + rank * length for rank in range(size)]
            parts = [(rank, max(start, first), min(end, first + length)) for rank, first in enumerate(firsts)]
            yield param, keeper, [(rank, first - start, last - start) for rank, first, last in parts if first < last]

    def _move(
        self,
        key: str,
        param: Tensor,
        keeper: int,
        parts: Sequence[tuple[int, int, int]],
        whole: Tensor,
        *,
        to_keeper: bool,
    ) -> None:
        """Move one kind of a parameter's state between the ranks that update it and `whole`, flat, of its keeper. By
        broadcasts: what sends to one rank makes a communicator of its own for each pair of ranks.
        """
        own = self.data_parallel_group.rank()
        for rank, start, end in parts:
            sender, receiver = (rank, keeper) if to_keeper else (keeper, rank)
            shard = self._get_main_param_and_optimizer_states(param)[key].detach() if own == rank else whole[:0]
            for first in range(start, end, SENT_ELEMENTS):
                last = min(end, first + SENT_ELEMENTS)
                ends = shard[first - start : last - start], whole[first:last]
                source, target = ends if to_keeper else ends[::-1]
                if own == sender:
                    values = source.to(param.device)
                else:
                    values = torch.empty(last - first, dtype=torch.float32, device=param.device)
                if sender != receiver:
                    dist.broadcast(values, group=self.data_parallel_group, group_src=sender)
                if own == receiver:
                    target.copy_(values)


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
