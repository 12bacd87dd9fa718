"""The weights of a Megatron model on its ranks, and what goes between it and files, for any layout: the weights of a
Hugging Face checkpoint, adapters beside frozen weights, and the training state (weights, optimizer, schedule, random
states) in Megatron's dist_checkpointing.

Adapters are LoRA's (Hu et al. 2106.09685), of linear layers. What leaves the model, for servers and files, are the
merged weights.
"""

import hashlib
import queue
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import functional as F

from megarl.config.errors import ConfigError
from megarl.config.schema.roles import LoraConfig, ParallelConfig
from megarl.files import CheckpointError
from megarl.mcore.checkpoints import (
    ADAPTER_PREFIX,
    BACKENDS,
    CONTENT,
    HEAD,
    HF_EMBEDDING,
    HF_HEAD,
    PEFT_PREFIX,
    VALUE_HEAD,
    CheckpointReader,
    Entry,
    PeftAdapter,
    build_peft_config,
    describe,
    has_adapter,
    holds_optimizer,
    is_finite,
    load_metadata,
    to_hf,
    to_megatron,
    to_peft,
)
from megarl.mcore.device import find_processor
from megarl.mcore.model import PackedGPT
from megarl.mcore.process_groups import meet
from megarl.models.architecture import Architecture
from megarl.models.families import Split

# Of an expert's weight on its rank: the local layers' name and that of Transformer Engine's grouped layers.
_LOCAL_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc\d)\.(weight|bias)|(linear_fc\d)\.(weight|bias)(\d+))"
)


def named_entries(chunks: Sequence[PackedGPT]) -> list[tuple[Entry, Tensor]]:
    """The parameters of this rank's pieces of the model and the constants beside them, in their order, each once."""
    result = []
    for chunk in chunks:
        layers, saved = [layer.layer_number - 1 for layer in chunk.decoder.layers], chunk.state_dict(keep_vars=True)
        tensors = [named for named in chunk.named_parameters() if not named[0].startswith(ADAPTER_PREFIX)]
        # The buffers that are a part of the checkpoint.
        tensors += [named for named in chunk.named_buffers() if named[0] in saved]
        for name, param in tensors:
            if name.startswith("decoder.layers."):
                prefix, middle, number, suffix = name.split(".", 3)
                name = f"{prefix}.{middle}.{layers[int(number)]}.{_number_expert(suffix, chunk)}"
            result.append((describe(name, chunk.arch, chunk.with_value_head), param))
    return result


def list_own_entries(chunks: Sequence[PackedGPT]) -> list[tuple[Entry, Tensor]]:
    """`named_entries` without the last stage's copy of tied embeddings."""
    shares = chunks[0].share_embeddings_and_output_weights
    return [named for named in named_entries(chunks) if not (shares and named[0].name == HEAD)]


def _number_expert(suffix: str, model: PackedGPT) -> str:
    """The name within its layer; an expert's weight with the expert's global number."""
    match = _LOCAL_EXPERT.fullmatch(suffix)
    if match is None:
        return suffix
    number, linear, kind = match.group(1, 2, 3) if match[1] is not None else match.group(6, 4, 5)
    first = parallel_state.get_expert_model_parallel_rank() * _num_local_experts(model)
    return f"mlp.experts.{first + int(number)}.{linear}.{kind}"


def _num_local_experts(model: PackedGPT) -> int:
    count: int = model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    return count


def load_hf(chunks: Sequence[PackedGPT], directory: Path, arch: Architecture) -> None:
    """Fill the model from a Hugging Face checkpoint; every rank reads its own part. A critic keeps its new value head
    where there is none (`score.weight`).

    Raises KeyError that names a missing tensor, ConfigError for one of another shape or with NaN or infinity.
    """
    with CheckpointReader(directory) as reader, torch.no_grad():
        for entry, param in named_entries(chunks):
            names = entry.hf_names
            if names == (VALUE_HEAD,) and VALUE_HEAD not in reader:
                continue
            if names == (HF_HEAD,) and arch.tied:
                names = (HF_EMBEDDING,)
            group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
            if entry.expert is not None:
                group = parallel_state.get_expert_tensor_parallel_group()
            tensors = [reader.read(name) for name in names]
            for name, tensor in zip(names, tensors, strict=True):
                if not is_finite(tensor):
                    raise ConfigError([f"{directory}: {name} has NaN or infinity; the checkpoint is damaged"])
            shard = to_megatron(entry, tensors, arch, group.size(), group.rank())
            if shard.shape != param.shape:
                found = f"{', '.join(names)} gives {entry.name} the shape {tuple(shard.shape)}"
                raise ConfigError([f"{directory}: {found}, config.json asks for {tuple(param.shape)}"])
            param.copy_(shard)


def export_hf(
    chunks: Sequence[PackedGPT],
    arch: Architecture,
    take: Callable[[Tensor], Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor (on the CPU) on global rank 0, which holds one parameter at a time, or one of all
    experts at one place; every rank must run it to its end. take: what is exported of each parameter, in
    the parameter's shape; by default its weights. dtype: of that; by default the parameter's.
    """
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    expert_replica = parallel_state.get_expert_data_parallel_rank()
    take, mine = take or take_weights, list_own_entries(chunks)
    stages: list[list[tuple[Entry, torch.Size, torch.dtype]]] = [[] for _ in range(pp_group.size())]
    dist.all_gather_object(stages, [(e, p.shape, dtype or p.dtype) for e, p in mine], group=pp_group)
    for stage, entries in enumerate(stages):
        for position, (entry, shape, sent) in enumerate(entries):
            if (replica if entry.expert is None else expert_replica) != 0:
                continue
            if stage == pp_group.rank():
                tensor = take(mine[position][1]).contiguous()
            else:
                tensor = torch.empty(shape, dtype=sent, device=mine[0][1].device)
            if pp_group.size() > 1:
                dist.broadcast(tensor, group=pp_group, group_src=stage)
            for described, shards in _gather(tensor, entry, chunks[0]):
                if dist.get_rank() == 0:
                    yield from ((name, whole.cpu()) for name, whole in to_hf(described, shards, arch))


def take_weights(param: Tensor) -> Tensor:
    """The weights of a parameter, merged with its adapter where it has one."""
    adapter = getattr(param, "adapter", None)
    return param.detach() if adapter is None else adapter.merge(param)


class Weights(Mapping[str, Tensor]):
    """This rank's weights by their entries' names; of those merged with an adapter one copy is kept at a time."""

    def __init__(self, named: Iterable[tuple[Entry, Tensor]]) -> None:
        self._params = {entry.name: param for entry, param in named}
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = (name, take_weights(self._params[name]))
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)


def take_gradient(tensor: Tensor) -> Tensor:
    """float32; zeros for a constant and a frozen parameter, with an adapter how the merged weight moves by it."""
    if (adapter := getattr(tensor, "adapter", None)) is not None:
        moves: Tensor = adapter.gradient()
        return moves
    return getattr(tensor, "main_grad") if tensor.requires_grad else torch.zeros_like(tensor, dtype=torch.float32)  # noqa: B009


def _gather(tensor: Tensor, entry: Entry, model: PackedGPT) -> list[tuple[Entry, list[Tensor]]]:
    """The shards of the parameter and, of an expert's one, those of its counterparts on expert-parallel ranks."""
    is_split = entry.split is not Split.none
    if entry.expert is None:
        return [(entry, gather_shards(tensor, parallel_state.get_tensor_model_parallel_group(), is_split))]
    # Expert-tensor-parallel ranks are the faster in the numbering of this group.
    shards = gather_shards(tensor, parallel_state.get_expert_tensor_and_model_parallel_group(), True)
    size, count = parallel_state.get_expert_tensor_parallel_world_size(), _num_local_experts(model)
    own, found = f".experts.{entry.expert}.", []
    for rank in range(len(shards) // size):
        name = entry.name.replace(own, f".experts.{rank * count + entry.expert % count}.")
        found.append((describe(name, model.arch, False), shards[rank * size : (rank + 1) * size]))
    return found


def gather_shards(tensor: Tensor, group: dist.ProcessGroup, is_split: bool) -> list[Tensor]:
    if group.size() == 1 or not is_split:
        return [tensor]
    shards = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(shards, tensor, group=group)
    return shards


class Adapter(torch.nn.Module):
    """scale * B A x of one linear layer, x: [tokens, 1, columns] or this rank's part of it, as the layer takes it. One
    split by rows (qkv, gate and up) has A whole and its rows of B; one split by columns its columns of A.
    """

    def __init__(self, linear: torch.nn.Module, entry: Entry, config: TransformerConfig, lora: LoraConfig, seed: int):
        super().__init__()
        weight: Any = linear.weight
        rows, columns = weight.shape
        parts = 2 if entry.split is Split.gate_up else 1
        self.entry, self.scale = entry, lora.alpha / lora.rank
        self.splits_columns = entry.split is Split.columns
        self.sequence_parallel: bool = config.sequence_parallel
        # [rank, columns], and B as [parts, rows / parts, rank]; two parts, gate and up, of a stacked weight.
        self.a = torch.nn.Parameter(self._draw(lora.rank, columns, seed).to(weight.dtype))
        # As in the paper, the product is 0 at the start.
        self.b = torch.nn.Parameter(torch.zeros(parts, rows // parts, lora.rank, dtype=weight.dtype))
        split, whole = (self.a, self.b) if self.splits_columns else (self.b, self.a)
        set_tensor_model_parallel_attributes(split, True, 1, 1)
        # Each rank sees its tokens alone: Megatron sums the gradients of such weights over the tensor-parallel ranks.
        whole.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def _draw(self, rank: int, columns: int, seed: int) -> Tensor:
        """Uniform within 1 / sqrt(columns), as PEFT draws it; the same numbers under every layout."""
        tp = parallel_state.get_tensor_model_parallel_world_size() if self.splits_columns else 1
        number = int.from_bytes(hashlib.sha256(f"{seed} {self.entry.name}".encode()).digest()[:7], "big")
        bound = (columns * tp) ** -0.5
        whole = torch.empty(rank, columns * tp)
        whole.uniform_(-bound, bound, generator=torch.Generator().manual_seed(number))
        return whole.chunk(tp, dim=1)[parallel_state.get_tensor_model_parallel_rank() if tp > 1 else 0].contiguous()

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(x, self.a)
        if self.splits_columns:
            sum_up: Any = reduce_from_tensor_model_parallel_region
            low = reduce_scatter_to_sequence_parallel_region(low) if self.sequence_parallel else sum_up(low)
        elif self.sequence_parallel:
            low = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
        else:
            low = copy_to_tensor_model_parallel_region(low)
        return self.scale * F.linear(low, self.b.flatten(0, 1))

    def add_to(self, linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> Any:
        """The linear layer's output with the adapter's, as a forward hook."""
        x, (out, bias), weight = inputs[0], output, getattr(linear, "layer_norm_weight", None)
        if weight is not None:
            # Transformer Engine's fused layers take the product's input before their RMS norm.
            gain = weight.float() + (1.0 if linear.zero_centered_gamma else 0.0)
            x = F.rms_norm(x.float(), x.shape[-1:], gain, linear.eps).to(x.dtype)
        return out + self(x), bias

    def merge(self, weight: Tensor) -> Tensor:
        """This rank's part of weight + scale * B A, computed in float32, in the weight's dtype."""
        product = self.b.detach().flatten(0, 1).float() @ self.a.detach().float()
        return torch.add(weight.detach().float(), product, alpha=self.scale).to(weight.dtype)

    def gradient(self) -> Tensor:
        """dB A + B dA, scaled: float32, in the weight's shape; how the merged weight moves along the gradient."""
        da, db = (getattr(param, "main_grad") for param in (self.a, self.b))  # noqa: B009
        a, b, da, db = (x.flatten(0, -2).float() for x in (self.a, self.b, da, db))
        return (self.scale * (db @ a + b @ da)).detach()

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        split = {"a": 1} if self.splits_columns else {"b": 1}
        state = self.state_dict(prefix="", keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(state, prefix, split, sharded_offsets)
        return sharded


class Adapters(torch.nn.ModuleDict):
    """The adapters of one piece of the model, by the names of their layers."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return {
            key: tensor
            for name, adapter in self.items()
            for key, tensor in cast(Adapter, adapter).sharded_state_dict(f"{prefix}{name}.").items()
        }


def attach_adapters(
    chunks: Sequence[PackedGPT], lora: LoraConfig | None, seed: int, checkpoint: str
) -> dict[str, Any] | None:
    """Freeze all weights but a value head and put adapters beside those that `lora` names, before `wrap_chunks`; None:
    nothing changes. Returns PEFT's adapter_config.json. checkpoint: that the adapters belong to.
    """
    if lora is None:
        return None
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            param.requires_grad_(name == HEAD and chunk.with_value_head)
        owners = {id(module.weight): module for module in chunk.modules() if hasattr(module, "weight")}
        adapters = Adapters()
        for entry, param in named_entries([chunk]):
            if has_adapter(entry, lora.layers):
                adapter = Adapter(owners[id(param)], entry, chunk.config, lora, seed)
                # `take_weights` merges by it; not a module of the layer, whose checkpoint would count it as its.
                param.adapter = adapter  # type: ignore[attr-defined]
                owners[id(param)].register_forward_hook(adapter.add_to)
                # Of decoder.layers.3.mlp.linear_fc1.weight: 3-mlp-linear_fc1
                adapters["-".join(entry.name.split(".")[2:-1])] = adapter
        chunk.adapters = adapters
    return build_peft_config(lora, chunks[0].arch, checkpoint, chunks[0].with_value_head)


def export_peft(
    chunks: Sequence[PackedGPT], arch: Architecture, config: Mapping[str, Any] | None
) -> PeftAdapter | None:
    """The whole adapters and value head, on the CPU. config: adapter_config.json; None: there are none. Every rank must
    call it.
    """
    if config is None:
        return None
    group = parallel_state.get_tensor_model_parallel_group()
    own: dict[str, Tensor] = {}
    for adapter in (cast(Adapter, each) for chunk in chunks for each in chunk.adapters.values()):
        splits = ((adapter.a, adapter.splits_columns), (adapter.b, not adapter.splits_columns))
        a, b = (
            [x.cpu() for x in gather_shards(each.detach().contiguous(), group, is_split)] for each, is_split in splits
        )
        own |= dict(to_peft(adapter.entry, a, b, arch))
    if chunks[-1].with_value_head and chunks[-1].post_process:
        own[f"{PEFT_PREFIX}{VALUE_HEAD}"] = chunks[-1].output_layer.weight.detach().cpu()
    stages: list[Any] = [None] * parallel_state.get_pipeline_model_parallel_world_size()
    dist.all_gather_object(stages, own, group=parallel_state.get_pipeline_model_parallel_group())
    return PeftAdapter(config, {name: tensor for stage in stages for name, tensor in stage.items()})


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

        def stage(tensor: Tensor) -> Tensor:
            return tensor.detach().to("cpu", copy=tensor.untyped_storage().data_ptr() in places)

        self._request = request
        self._thread: threading.Thread | None = None
        if request.async_fn is not None:
            transforms, _ = request.async_fn.args
            _, buckets, results = request.async_fn_args
            staged = [
                (path, key, (items, [(item, stage(x)) for item, x in tensors]))
                for path, key, (items, tensors) in buckets
            ]
            buckets[:] = staged
            self._thread = threading.Thread(target=_write, args=(transforms, staged, results), name="megarl-save")
            self._thread.start()

    def finish(self) -> None:
        """Wait for the thread, then complete the directory. Every rank must call it; raises what writing raised."""
        if self._thread is not None:
            self._thread.join()
        meet()
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
    meet()
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
        # Cut gate and up apart, and give each half memory of its own, a parameter at a time: Megatron's writer would
        # copy all halves of the optimizer's state while all whole ones are still there.
        apply_factories(sharded["optimizer"])
        for part in nested_values(sharded["optimizer"]):
            if isinstance(part, ShardedTensor) and part.data.untyped_storage().nbytes() != part.data.nbytes:
                part.data = part.data.clone()
    request = dist_checkpointing.save(sharded, str(directory), async_sharded_save=True, content_metadata=dict(CONTENT))
    return Writing(directory, request, live)


def load_state(directory: Path, state: TrainingState) -> None:
    """Read what `begin_save` wrote, under any layout; random states under the layout, and on the kind of device, that
    they are of. Every rank must call it. The files contain pickles: their checksums must have been verified.

    Raises FileNotFoundError where `directory` holds no checkpoint, CheckpointError where it has no optimizer's state.
    """
    if not (directory / BACKENDS).is_file():
        raise FileNotFoundError(f"{directory}: no training state ({BACKENDS} is missing)")
    # Megatron reads the metadata as the pickle that it is; this reads it without running any of it, so it comes first.
    has_optimizer = holds_optimizer(directory)
    if state.optimizer is not None and not has_optimizer:
        raise CheckpointError(
            f"{directory}: holds weights without an optimizer's state, so no training can continue from it;"
            " megarl convert makes a checkpoint of them that one can start from"
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
    if any(key.startswith(ADAPTER_PREFIX) for key in keys) and not any(hasattr(chunk, "adapters") for chunk in chunks):
        raise CheckpointError(f"{directory}: has LoRA adapters beside its weights; megarl convert merges them")
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


def _take_random_state() -> dict[str, Any]:
    state = {"torch": torch.get_rng_state(), "tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}
    return state | find_processor().take_random_state()


def _put_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if find_processor().put_random_state(state):
        tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def _shard_random_state(state: dict[str, Any] | None) -> ShardedObject:
    """Each rank has its own."""
    return ShardedObject("random", state, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


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
