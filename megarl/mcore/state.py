"""Training state (weights, optimizer, schedule, random states) in Megatron's dist_checkpointing, for any layout."""

import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megarl.config.schema.roles import ParallelConfig
from megarl.files import CheckpointError
from megarl.mcore.checkpoint_format import CONTENT, holds_optimizer, load_metadata
from megarl.mcore.device import find_machine
from megarl.mcore.entries import PREFIX
from megarl.mcore.model import PackedGPT


@dataclass(frozen=True)
class TrainingState:
    """What a role's rank holds; saved and loaded in place."""

    chunks: Sequence[PackedGPT]
    optimizer: MegatronOptimizer | None
    scheduler: OptimizerParamScheduler | None
    parallel: ParallelConfig


class Writing:
    """A state on its way to disk: copied to host memory, written by a thread of this rank."""

    def __init__(self, directory: Path, request: AsyncRequest, live: Iterable[Tensor]) -> None:
        """live: tensors that training changes meanwhile. Others in host memory were made for this save: no copy."""
        self.directory = directory
        places = {tensor.untyped_storage().data_ptr() for tensor in live}
        self._request = request
        self._thread: threading.Thread | None = None
        if request.async_fn is not None:
            transforms, _ = request.async_fn.args
            _, buckets, results = request.async_fn_args
            staged = [(path, key, (items, _copy_to_host(tensors, places))) for path, key, (items, tensors) in buckets]
            buckets[:] = staged
            self._thread = threading.Thread(target=_write, args=(transforms, staged, results), name="megarl-save")
            self._thread.start()

    def finish(self) -> None:
        """Wait for the thread, then complete the directory. Every rank must call it; raises what writing raised."""
        if self._thread is not None:
            self._thread.join()
        for finalize in self._request.finalize_fns:
            finalize()


def write_on_first_rank(write: Callable[[], None], gathered: Iterable[object] = ()) -> None:
    """The first rank writes; every rank must call it. Raises, on the first rank, the OSError of a full disk. gathered:
    what `write` reads and all ranks gather, read to its end by each also after an error.
    """
    failed: OSError | None = None
    if dist.get_rank() == 0:
        try:
            write()
        except OSError as error:
            failed = error
    for _ in gathered:
        pass
    dist.barrier()
    if failed is not None:
        raise failed


def begin_save(directory: Path, state: TrainingState) -> Writing:
    """Write to `directory`, created if need be, beside what this process does next. Every rank must call it."""
    write_on_first_rank(lambda: directory.mkdir(parents=True, exist_ok=True))
    sharded = _shard(state, is_loading=False) | {
        "layout": asdict(state.parallel),
        "random": _shard_random_state(_take_random_state()),
    }
    # Megatron's own queue is a process that imports the main module anew; a thread needs none.
    filesystem_async._results_queue = queue.Queue()
    live = [tensor for chunk in state.chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
    if state.optimizer is not None:
        _separate_halves(sharded["optimizer"])
    request = dist_checkpointing.save(sharded, str(directory), async_sharded_save=True, content_metadata=dict(CONTENT))
    return Writing(directory, request, live)


def load_state(directory: Path, state: TrainingState) -> None:
    """Read what `begin_save` wrote, under any layout; random states under the layout, and on the kind of device, that
    they are of. Every rank must call it. The files contain pickles: their checksums must have been verified.

    Raises FileNotFoundError where `directory` holds no checkpoint, CheckpointError where it has no optimizer's state.
    """
    if not (directory / "metadata.json").is_file():
        raise FileNotFoundError(f"{directory}: no training state (metadata.json is missing)")
    # Megatron reads the metadata as the pickle that it is; this reads it without running any of it, so it comes first.
    has_optimizer = holds_optimizer(directory)
    if state.optimizer is not None and not has_optimizer:
        raise CheckpointError(
            f"{directory}: holds weights without an optimizer's state, so no training can continue from it;"
            " load_weights takes the weights alone"
        )
    template = _shard(state, is_loading=True)
    common = dist_checkpointing.load_common_state_dict(str(directory))
    if common.get("layout") == asdict(state.parallel):
        template["random"] = _shard_random_state(None)
    loaded = dist_checkpointing.load(template, str(directory))
    _put_weights(directory, state.chunks, loaded["model"])
    if state.optimizer is not None and state.scheduler is not None:
        state.optimizer.load_state_dict(loaded["optimizer"])
        # Megatron adds the loaded steps to those made.
        state.scheduler.num_steps = 0
        state.scheduler.load_state_dict(loaded["scheduler"])
    if "random" in template:
        _put_random_state(loaded["random"])


def load_weights(directory: Path, chunks: Sequence[PackedGPT]) -> None:
    """Read the weights alone, under any layout, in the model's own dtype. Every rank must call it. Raises
    CheckpointError where there is no checkpoint, Megatron's CheckpointingException or KeyError for another model's.
    """
    keys = load_metadata(directory).state_dict_metadata
    if any(key.startswith(PREFIX) for key in keys) and not any(hasattr(chunk, "adapters") for chunk in chunks):
        raise CheckpointError(
            f"{directory}: has LoRA adapters beside its weights; tools/convert_checkpoint.py merges them"
        )
    wanted = {str(number): shard_weights(chunk) for number, chunk in enumerate(chunks)}
    _put_weights(directory, chunks, dist_checkpointing.load({"model": wanted}, str(directory))["model"])


def shard_weights(chunk: Any, **options: Any) -> ShardedStateDict:
    """The weights of a piece of a model, without what Transformer Engine calls the extra state of its modules: pickles
    of the scales of FP8 products, which the recipes that there are (`Fp8Recipe`) do not keep.
    """
    for module in chunk.modules():
        if hasattr(module, "_split_extra_state"):
            # Of Megatron's layer of several experts, which unpickles its own state, whether or not there is one.
            module._split_extra_state = lambda state, number=module.num_gemms: [state] * number
    return {key: x for key, x in chunk.sharded_state_dict(**options).items() if not _is_extra_state(key)}


def _is_extra_state(key: str) -> bool:
    """Whether it is an _extra_state, or one of those of experts: _extra_state1 and so on."""
    return key.rpartition(".")[2].startswith("_extra_state")


def _put_weights(directory: Path, chunks: Sequence[Any], loaded: Mapping[str, Any]) -> None:
    """loaded: the state of each chunk by its number. Raises CheckpointError where it is not all that the model has."""
    for number, chunk in enumerate(chunks):
        missing, unexpected = chunk.load_state_dict(loaded[str(number)], strict=False)
        problems = [key for key in missing if not _is_extra_state(key)] + unexpected
        if problems:
            raise CheckpointError(f"{directory}: does not hold what the model has: {', '.join(problems[:5])}")


def _shard(state: TrainingState, *, is_loading: bool) -> ShardedStateDict:
    # A copy: Megatron adds process groups to it.
    metadata = dict(CONTENT)
    sharded: dict[str, Any] = {
        "model": {str(number): shard_weights(chunk, metadata=metadata) for number, chunk in enumerate(state.chunks)}
    }
    if state.optimizer is not None and state.scheduler is not None:
        sharded["optimizer"] = state.optimizer.sharded_state_dict(
            sharded["model"], is_loading=is_loading, metadata=metadata
        )
        sharded["scheduler"] = state.scheduler.state_dict()
    return sharded


def _separate_halves(sharded: ShardedStateDict) -> None:
    """Apply the factories that cut gate and up apart, and give each half memory of its own, a parameter at a time.

    Megatron's writer would copy all halves of the optimizer's state while all whole ones are still there.
    """
    apply_factories(sharded)
    for part in nested_values(sharded):
        if isinstance(part, ShardedTensor) and part.data.untyped_storage().nbytes() != part.data.nbytes:
            part.data = part.data.clone()


def _take_random_state() -> dict[str, Any]:
    state = {"torch": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}
    return state | find_machine().take_random_state()


def _put_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if find_machine().put_random_state(state):
        tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def _shard_random_state(state: dict[str, Any] | None) -> ShardedObject:
    """Each rank has its own."""
    return ShardedObject("random", state, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def _copy_to_host(items: list[tuple[Any, Tensor]], places: set[int]) -> list[tuple[Any, Tensor]]:
    """places: addresses of storages that must be copied."""
    return [
        (item, tensor.detach().to("cpu", copy=tensor.untyped_storage().data_ptr() in places)) for item, tensor in items
    ]


def _write(transforms: list[Any], buckets: list[Any], results: "queue.Queue[Any]") -> None:
    """Megatron's writer of one file, called for each; the results are what its finalize functions take."""
    written: dict[int, Any] = {}
    for number, bucket in enumerate(buckets):
        answers: queue.Queue[Any] = queue.Queue()
        # The count of files left, which the writer takes one from.
        left: queue.Queue[int] = queue.Queue()
        left.put(number)
        writer = filesystem_async.FileSystemWriterAsync.write_preloaded_data
        writer(transforms, number, bucket, answers, left, use_fsync=True)
        _, answer = answers.get_nowait()
        if isinstance(answer, Exception):
            results.put(answer)
            return
        written[number] = answer
    results.put(written)
