"""Where a parameter lies in a checkpoint of Megatron's dist_checkpointing, whose keys know no layout.

Layers that are alike are stacked: decoder.layers.mlp.linear_fc2.weight is [layers, rows, columns], an expert's
decoder.layers.mlp.experts.experts.linear_fc1.weight [layers, experts, rows, columns]. Of a model in which some layers
have experts and others do not, each layer has keys of its own, decoder.layers.3.mlp.linear_fc2.weight.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.config.schema.roles import Dtype, ParallelConfig
from megarl.mcore.weights.entries import Entry, compute_megatron_shape
from megarl.mcore.worker_spec import Role
from megarl.models.architecture import Architecture

KIND = "megatron"
DESCRIPTION = "hf"
"""Directory in it with everything of the Hugging Face checkpoint that is not weights"""
METADATA = ".metadata"
COMMON = "common.pt"
BACKENDS = "metadata.json"
CONTENT = {"distrib_optim_sharding_type": "fully_reshardable"}
"""The only format whose optimizer state can change its tensor- and pipeline-parallel layout."""
GATHERED_ELEMENTS = 1 << 26
"""How many elements of the optimizer's state a save gathers on the device at once, over all data-parallel ranks"""
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")


def describe_role(role: Role, dtype: Dtype, parallel: ParallelConfig, iteration: int | None) -> dict[str, Any]:
    """What the manifest of a role's directory says about it."""
    layout = {name: getattr(parallel, name) for name in ("tp", "pp", "dp", "cp", "ep")}
    return {"kind": KIND, "role": role.value, "dtype": dtype.value, "parallel": layout, "iteration": iteration}


def belongs_to_optimizer(key: str) -> bool:
    return _OPTIMIZER.match(key) is not None


def locate(entry: Entry, arch: Architecture) -> tuple[str, tuple[int, ...]]:
    """Key and place along the stacked axes: (), (layer,), (layer, expert), or (expert,) where layers differ."""
    if not entry.name.startswith("decoder.layers."):
        return entry.name, ()
    _, _, layer, suffix = entry.name.split(".", 3)
    index: tuple[int, ...] = () if entry.expert is None else (entry.expert,)
    if entry.expert is not None:
        suffix = f"mlp.experts.experts.{suffix.removeprefix(f'mlp.experts.{entry.expert}.')}"
    if arch.has_unlike_layers:
        return f"decoder.layers.{layer}.{suffix}", index
    return f"decoder.layers.{suffix}", (int(layer), *index)


def compute_global_shapes(entries: Sequence[Entry], arch: Architecture, tp: int) -> Mapping[str, tuple[int, ...]]:
    """Key -> whole shape with the stacked axes."""
    layers = () if arch.has_unlike_layers else (arch.num_layers,)
    stacked = (*layers, arch.experts.num_experts if arch.experts else 0)
    located = ((entry, *locate(entry, arch)) for entry in entries)
    return {key: (*stacked[: len(index)], *compute_megatron_shape(entry, arch, tp)) for entry, key, index in located}
