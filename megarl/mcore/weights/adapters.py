"""LoRA adapters (Hu et al. 2106.09685) in files: which weights have one, their keys in checkpoints, PEFT's form.

W + alpha / rank * B A stands for a weight W [rows, columns] with A [rank, columns] and B [rows, rank]. Imports no
Megatron.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.config.schema.roles import LoraConfig, LoraLayers
from megarl.json_text import load_json_object
from megarl.mcore.weights.entries import Entry, list_layer, to_hf
from megarl.models.architecture import Architecture
from megarl.models.family import Split

PREFIX = "adapters."
"""Keys of adapters in Megatron's checkpoints and names of their parameters begin so"""
FOLDER = "adapter"
"""Beside the weights of a Hugging Face checkpoint: what PEFT loads"""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_LINEARS = {
    LoraLayers.attention: re.compile(r"\.self_attention\.linear_(?:qkv|proj)\.weight$"),
    LoraLayers.mlp: re.compile(r"\.mlp\.linear_fc[12]\.weight$"),
}


@dataclass(frozen=True)
class AdapterFactors:
    """A and B of one weight, whole or this rank's part."""

    a: Tensor
    """[rank, columns]"""
    b: Tensor
    """[parts, rows / parts, rank]; two parts, gate and up, of a stacked weight"""


def has_adapter(entry: Entry, layers: Iterable[LoraLayers]) -> bool:
    return any(_LINEARS[kind].search(entry.name) for kind in layers)


def name_adapter(entry: Entry) -> str:
    """Of decoder.layers.3.mlp.linear_fc1.weight: 3-mlp-linear_fc1."""
    return "-".join(entry.name.split(".")[2:-1])


def has_adapters(keys: Iterable[str]) -> bool:
    """Whether there are adapters among the keys of a checkpoint of Megatron's."""
    return any(key.startswith(PREFIX) for key in keys)


def count_layer(arch: Architecture, lora: LoraConfig, tp: int) -> int:
    """Parameters of the adapters of one layer on a rank; layers are alike in what has adapters."""
    count = 0
    for entry in list_layer(arch, 0, experts=()):
        if has_adapter(entry, lora.layers):
            rows, columns = sum(shape[0] for shape in entry.shapes), entry.shapes[0][1]
            is_row = entry.split is Split.columns
            count += lora.rank * (columns // tp + rows if is_row else columns + rows // tp)
    return count


def merge(weight: Tensor, factors: AdapterFactors, scale: float) -> Tensor:
    """weight + scale * B A, computed in float32, in the weight's dtype."""
    product = factors.b.detach().flatten(0, 1).float() @ factors.a.detach().float()
    return torch.add(weight.detach().float(), product, alpha=scale).to(weight.dtype)


def to_peft(entry: Entry, a: Sequence[Tensor], b: Sequence[Tensor], arch: Architecture) -> Iterable[tuple[str, Tensor]]:
    """PEFT's tensors of one weight, from A and B of all tensor-parallel ranks.

    Query, key and value, and gate and up, have the same A.
    """
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
        write_config(checkpoint, self.config)
        save_file(dict(self.tensors), checkpoint / FOLDER / WEIGHTS, {"format": "pt"})


def write_config(checkpoint: Path, config: Mapping[str, Any]) -> None:
    (checkpoint / FOLDER).mkdir(parents=True, exist_ok=True)
    (checkpoint / FOLDER / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n")


def load_config(checkpoint: Path) -> tuple[Mapping[str, Any], float]:
    """adapter_config.json and alpha / rank. Raises ValueError or FileNotFoundError where they cannot be had."""
    path = checkpoint / FOLDER / CONFIG
    fields = load_json_object(path)
    try:
        return fields, float(fields["lora_alpha"]) / int(fields["r"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{path}: r and lora_alpha are needed: {error!r}") from None
