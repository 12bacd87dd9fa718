"""Host memory for what a role does not need between its calls, where several roles share a GPU. Only storages move:
every tensor stays the object it is, with all views on it. On a CPU the same moves happen within host memory.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megarl.config.schema.roles import Offload
from megarl.mcore.device import device, find_machine

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

    def park(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Move the storages to the host; they have 0 bytes then. Does nothing while others are parked here."""
        if self._parked:
            return
        parked = [(storage, storage.nbytes()) for storage in storages.values()]
        if self.keep:
            self._reserve(sum(size for _, size in parked))
            for content, host in self._pair(parked):
                host.copy_(content, non_blocking=True)
        find_machine().synchronize()
        self._parked = parked
        for storage, _ in parked:
            storage.resize_(0)

    def bring(self) -> None:
        """Move everything back."""
        for storage, size in self._parked:
            storage.resize_(size)
            if not self.keep:
                _as_bytes(storage).zero_()
        if self.keep:
            for content, host in self._pair(self._parked):
                content.copy_(host, non_blocking=True)
        find_machine().synchronize()
        self._parked = []

    def _reserve(self, size: int) -> None:
        """In pieces of a power of two: torch rounds pinned memory up to the next one, which for whole storages may be
        nearly twice their size (ATen/core/CachingHostAllocator.h).
        """
        held = sum(host.numel() for host in self._hosts)
        while held < size:
            piece = min(PIECE_BYTES, size - held)
            self._hosts.append(torch.empty(piece, dtype=torch.uint8, pin_memory=find_machine().pins_memory))
            held += piece

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
        self.leave()

    @contextmanager
    def during(self, training: bool) -> Iterator[None]:
        """Weights, and with `training` also optimizer and gradients, are on the device inside."""
        if self.offload is None:
            yield
            return
        self._weights.bring()
        if training:
            self._training.bring()
            self._gradients.bring()
        yield
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
            self._weights.park(weights)
        drop_fp8_weights(self._models)
        find_machine().give_back()


def _on_device(verb: Callable[..., Any], training: bool) -> Callable[..., Any]:
    @functools.wraps(verb)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.offload.during(training):
            return verb(self, *args, **kwargs)

    return call


def uses_weights(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Of a verb of a worker: its weights are on the device."""
    return _on_device(verb, training=False)


def uses_everything(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Of a verb of a worker: its weights, optimizer and gradients are on the device."""
    return _on_device(verb, training=True)
