"""LoRA (Hu et al. 2106.09685) for the linear layers of a Megatron model: low-rank adapters are trained beside frozen
weights. What leaves the model, for servers and files, are the merged weights.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
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

from megarl.config.schema.roles import LoraConfig
from megarl.mcore.entries import Entry, PeftAdapter, build_peft_config, has_adapter, name_adapter, to_peft
from megarl.mcore.model import PackedGPT
from megarl.mcore.state import gather_shards, named_entries
from megarl.models.architecture import Architecture
from megarl.models.families import Split


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
    """The adapters of one piece of the model, by `name_adapter`."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return {
            key: tensor
            for name, adapter in self.items()
            for key, tensor in cast(Adapter, adapter).sharded_state_dict(f"{prefix}{name}.").items()
        }


def attach_adapters(
    chunks: Sequence[PackedGPT], lora: LoraConfig | None, seed: int, checkpoint: str
) -> dict[str, Any] | None:
    """Freeze all weights and put adapters beside those that `lora` names, before `wrap_chunks`; None: nothing changes.
    Returns PEFT's adapter_config.json. checkpoint: that the adapters belong to.
    """
    if lora is None:
        return None
    for chunk in chunks:
        chunk.requires_grad_(False)
        owners = {id(module.weight): module for module in chunk.modules() if hasattr(module, "weight")}
        adapters = Adapters()
        for entry, param in named_entries([chunk]):
            if has_adapter(entry, lora.layers):
                adapter = Adapter(owners[id(param)], entry, chunk.config, lora, seed)
                # `state.take_weights` merges by it; not a module of the layer, whose checkpoint would count it as its.
                param.adapter = adapter  # type: ignore[attr-defined]
                owners[id(param)].register_forward_hook(_build_hook(adapter))
                adapters[name_adapter(entry)] = adapter
        chunk.adapters = adapters
    return build_peft_config(lora, chunks[0].arch, checkpoint)


def _build_hook(adapter: Adapter) -> Any:
    def add(linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> Any:
        out, bias = output
        return out + adapter(_normalize(linear, inputs[0])), bias

    return add


def _normalize(linear: Any, x: Tensor) -> Tensor:
    """The input of the linear layer's product: Transformer Engine's fused layers take it before their RMS norm."""
    weight = getattr(linear, "layer_norm_weight", None)
    if weight is None:
        return x
    gain = weight.float() + (1.0 if linear.zero_centered_gamma else 0.0)
    return F.rms_norm(x.float(), x.shape[-1:], gain, linear.eps).to(x.dtype)


def export_peft(
    chunks: Sequence[PackedGPT], arch: Architecture, config: Mapping[str, Any] | None
) -> PeftAdapter | None:
    """The whole adapters, on the CPU. config: adapter_config.json; None: there are none. Every rank must call it."""
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
    stages: list[Any] = [None] * parallel_state.get_pipeline_model_parallel_world_size()
    dist.all_gather_object(stages, own, group=parallel_state.get_pipeline_model_parallel_group())
    return PeftAdapter(config, {name: tensor for stage in stages for name, tensor in stage.items()})
