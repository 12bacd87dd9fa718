"""The parameters of a whole model: their names in Megatron and in Hugging Face checkpoints, and how they are split.
What a layer has is the table of its family (megarl/models/families.py). Imports no Megatron.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.config.schema.roles import LoraConfig, LoraLayers
from megarl.models.architecture import Architecture
from megarl.models.families import Shape, Split, Weight, list_weights

VALUE_HEAD = "score.weight"
"""Hugging Face name of the value head: float [1, hidden size]"""
VOCAB_MULTIPLE = 64
"""The vocabulary is padded to a multiple of this, so that checkpoints of different layouts have the same shapes."""
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")

EMBEDDING, FINAL_NORM = "embedding.word_embeddings.weight", "decoder.final_layernorm.weight"
HEAD = "output_layer.weight"
HF_EMBEDDING, HF_HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Entry:
    """One parameter of the whole model."""

    name: str
    """Megatron's, with global layer and expert numbers: decoder.layers.3.mlp.experts.17.linear_fc1.weight"""
    hf_names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    """Shapes of the Hugging Face tensors"""
    split: Split
    served: str
    """SGLang's tensor"""
    expert: int | None = None
    """Global number of the expert that it belongs to"""
    is_constant: bool = False
    """A buffer in float32 that training leaves as it is"""

    @property
    def parts(self) -> list[tuple[str, int, int, int]]:
        """Hugging Face tensor, first row, rows and columns (of a vector 1) of what the parameter is made of."""
        found = []
        for name, shape in zip(self.hf_names, self.shapes, strict=True):
            count = 2 if self.split is Split.gate_up and len(self.hf_names) == 1 else 1
            rows, cols = shape[0] // count, (shape[1] if len(shape) > 1 else 1)
            found += [(name, number * rows, rows, cols) for number in range(count)]
        return found


def describe(name: str, arch: Architecture, with_value_head: bool) -> Entry:
    """Find a parameter by Megatron's name with global layer and expert numbers. Raises KeyError for an unknown one."""
    h, vocab = arch.hidden_size, ((arch.vocab_size, arch.hidden_size),)
    if name == HEAD and with_value_head:
        return Entry(name, (VALUE_HEAD,), ((1, h),), Split.none, VALUE_HEAD)
    if name in (EMBEDDING, HEAD):
        hf_name = HF_EMBEDDING if name == EMBEDDING else HF_HEAD
        return Entry(name, (hf_name,), vocab, Split.vocab, hf_name)
    if name == FINAL_NORM:
        return Entry(name, ("model.norm.weight",), ((h,),), Split.none, "model.norm.weight")
    _, _, layer, suffix = name.split(".", 3)
    found = _EXPERT.search(suffix)
    weight = _index_names(arch, int(layer))[_EXPERT.sub("{}", suffix)]
    return _build_entry(name, weight, int(layer), int(found[0]) if found else None)


@lru_cache(maxsize=4096)
def _index_names(arch: Architecture, layer: int) -> dict[str, Weight]:
    """The table of a layer by Megatron's names, the local layers' and Transformer Engine's."""
    weights = list_weights(arch, layer)
    return {name: weight for weight in weights for name in (weight.name, weight.saved) if name}


def _build_entry(name: str, weight: Weight, layer: int, expert: int | None) -> Entry:
    prefix = f"model.layers.{layer}."
    hf_names = tuple(prefix + hf_name.replace("{}", str(expert)) for hf_name in weight.hf_names)
    served = prefix + weight.served if weight.served else hf_names[0]
    return Entry(name, hf_names, weight.shapes, weight.split, served, expert, weight.is_constant)


def list_layer(
    arch: Architecture, layer: int, experts: Iterable[int] | None = None, *, saved: bool = False
) -> Iterator[Entry]:
    """The parameters of a layer, of all experts or of these. saved: under the names that Megatron's checkpoints have,
    in which norms belong to the linear layer after them; else the local layers' names.
    """
    weights = list_weights(arch, layer)
    numbers = list(experts if experts is not None else range(arch.experts.num_experts if arch.experts else 0))
    per_expert = [weight for weight in weights if weight.per_expert]
    for weight in weights:
        if not weight.per_expert:
            name = weight.saved if saved and weight.saved else weight.name
            yield _build_entry(f"decoder.layers.{layer}.{name}", weight, layer, None)
        elif weight is per_expert[0]:
            for number in numbers:
                for each in per_expert:
                    name = each.name.replace("{}", str(number))
                    yield _build_entry(f"decoder.layers.{layer}.{name}", each, layer, number)


def list_entries(arch: Architecture, with_value_head: bool) -> list[Entry]:
    """Every parameter of the whole model once, layer by layer, with the names that Megatron's checkpoints have."""
    layers = [entry for layer in range(arch.num_layers) for entry in list_layer(arch, layer, saved=True)]
    head = [] if arch.tied and not with_value_head else [describe(HEAD, arch, with_value_head)]
    return [describe(EMBEDDING, arch, False), *layers, describe(FINAL_NORM, arch, False), *head]


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    multiple = math.lcm(VOCAB_MULTIPLE, tp)
    return math.ceil(vocab_size / multiple) * multiple


def to_megatron(entry: Entry, tensors: Sequence[Tensor], arch: Architecture, tp: int, tp_rank: int) -> Tensor:
    """Whole Hugging Face tensors -> this tensor-parallel rank's shard."""
    if entry.split is Split.qkv:
        heads = arch.num_kv_heads
        grouped = torch.cat([x.reshape(heads, -1, *x.shape[1:]) for x in tensors], dim=1)
        # With fewer key-value heads than ranks the cuts are within a group.
        return grouped.reshape(-1, *tensors[0].shape[1:]).chunk(tp)[tp_rank]
    if entry.split is Split.gate_up:
        return torch.cat([x.chunk(tp)[tp_rank] for x in split_gate_up(tensors)])
    (whole,) = tensors
    if entry.split is Split.columns:
        return whole.chunk(tp, dim=1)[tp_rank]
    if entry.split is Split.vocab:
        size = padded_vocab_size(arch.vocab_size, tp) // tp
        shard = whole[tp_rank * size : (tp_rank + 1) * size]
        if len(shard) == size:
            return shard
        return torch.cat([shard, shard.new_zeros(size - len(shard), *whole.shape[1:])])
    return whole


def split_gate_up(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Gate and up, which a Hugging Face checkpoint holds as two tensors or as one."""
    return tensors if len(tensors) == 2 else tensors[0].chunk(2)


def to_hf(entry: Entry, shards: Sequence[Tensor], arch: Architecture) -> list[tuple[str, Tensor]]:
    """The shards of all tensor-parallel ranks -> whole Hugging Face tensors by name."""
    if entry.split is Split.qkv:
        whole = torch.cat(list(shards))
        grouped = whole.reshape(arch.num_kv_heads, -1, arch.head_size, *whole.shape[1:])
        sizes = [arch.num_heads // arch.num_kv_heads, 1, 1]
        parts = [x.reshape(-1, *whole.shape[1:]) for x in grouped.split(sizes, dim=1)]  # type: ignore[no-untyped-call]
    elif entry.split is Split.gate_up:
        halves = [shard.chunk(2) for shard in shards]
        parts = [torch.cat([half[i] for half in halves]) for i in range(2)]
        if len(entry.hf_names) == 1:
            parts = [torch.cat(parts)]
    elif entry.split is Split.columns:
        parts = [torch.cat(list(shards), dim=1)]
    elif entry.split is Split.vocab:
        # The largest of all parameters: not copied where it is whole already.
        parts = [(shards[0] if len(shards) == 1 else torch.cat(list(shards)))[: arch.vocab_size]]
    else:
        parts = [shards[0]]
    return [(name, part.contiguous()) for name, part in zip(entry.hf_names, parts, strict=True)]


def compute_megatron_shape(entry: Entry, arch: Architecture, tp: int) -> Shape:
    """The shape of the whole parameter in Megatron, before tensor parallelism splits it over `tp` ranks."""
    vocab = entry.split is Split.vocab
    rows = padded_vocab_size(arch.vocab_size, tp) if vocab else sum(shape[0] for shape in entry.shapes)
    return (rows, *entry.shapes[0][1:])


PREFIX = "adapters."
"""Keys of adapters in Megatron's checkpoints and names of their parameters begin so"""
FOLDER = "adapter"
"""Beside the weights of a Hugging Face checkpoint: what PEFT loads"""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_LINEARS = {
    LoraLayers.attention: re.compile(r"\.self_attention\.linear_(?:qkv|proj)\.weight$"),
    LoraLayers.mlp: re.compile(r"\.mlp\.linear_fc[12]\.weight$"),
}


def has_adapter(entry: Entry, layers: Iterable[LoraLayers]) -> bool:
    return any(_LINEARS[kind].search(entry.name) for kind in layers)


def name_adapter(entry: Entry) -> str:
    """Of decoder.layers.3.mlp.linear_fc1.weight: 3-mlp-linear_fc1."""
    return "-".join(entry.name.split(".")[2:-1])


def count_layer(arch: Architecture, lora: LoraConfig, tp: int) -> int:
    """Parameters of the adapters of one layer on a rank; layers are alike in what has adapters."""
    count = 0
    for entry in list_layer(arch, 0, experts=()):
        if has_adapter(entry, lora.layers):
            rows, columns = sum(shape[0] for shape in entry.shapes), entry.shapes[0][1]
            is_row = entry.split is Split.columns
            count += lora.rank * (columns // tp + rows if is_row else columns + rows // tp)
    return count


def to_peft(entry: Entry, a: Sequence[Tensor], b: Sequence[Tensor], arch: Architecture) -> Iterable[tuple[str, Tensor]]:
    """PEFT's tensors of one weight, from A and B of all tensor-parallel ranks; stacked weights have the same A."""
    if entry.split is Split.columns:
        ((name, whole),) = to_hf(entry, a, arch)
        pairs = [(name, whole, b[0].flatten(0, 1))]
    else:
        pairs = [(name, a[0], part) for name, part in to_hf(entry, [shard.flatten(0, 1) for shard in b], arch)]
    for name, own_a, own_b in pairs:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        yield f"{module}.lora_A.weight", own_a.clone()
        yield f"{module}.lora_B.weight", own_b.clone()


def build_peft_config(lora: LoraConfig, arch: Architecture, base: str) -> dict[str, Any]:
    """PEFT's adapter_config.json, for this model. base: the checkpoint that the adapters belong to."""
    entries = [entry for entry in list_layer(arch, 0, experts=()) if has_adapter(entry, lora.layers)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted({name.split(".")[-2] for entry in entries for name in entry.hf_names}),
    }


@dataclass(frozen=True)
class PeftAdapter:
    """What peft.PeftModel.from_pretrained loads, from the folder `FOLDER` of a checkpoint's directory."""

    config: Mapping[str, Any]
    """adapter_config.json"""
    tensors: Mapping[str, Tensor]

    def write(self, checkpoint: Path) -> None:
        folder = checkpoint / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(json.dumps(dict(self.config), indent=2) + "\n")
        if self.tensors:
            save_file(dict(self.tensors), folder / WEIGHTS, {"format": "pt"})
            (folder / WEIGHTS).chmod(0o644)
