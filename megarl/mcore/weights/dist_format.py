"""Where a parameter lies in a checkpoint of Megatron's dist_checkpointing, whose keys know no layout.

Layers are stacked: decoder.layers.mlp.linear_fc2.weight is [layers, rows, columns], an expert's
decoder.layers.mlp.experts.experts.linear_fc1.weight [layers, experts, rows, columns].
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.config.schema.roles import Dtype, ParallelConfig
from megarl.mcore.model.architecture import Architecture
from megarl.mcore.weights.entries import Entry, compute_megatron_shape
from megarl.mcore.worker_spec import Role

KIND = "megatron"
DESCRIPTION = "hf"
"""Directory in it with everything of the Hugging Face checkpoint that is not weights"""
METADATA = ".metadata"
COMMON = "common.pt"
BACKENDS = "metadata.json"
CONTENT = {"distrib_optim_sharding_type": "fully_reshardable"}
"""The only format whose optimizer state can change its tensor- and pipeline-parallel layout."""
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")


def describe_role(role: Role, dtype: Dtype, parallel: ParallelConfig, iteration: int | None) -> dict[str, Any]:
    """What the manifest of a role's directory says about it."""
    layout = {name: getattr(parallel, name) for name in ("tp", "pp", "dp", "cp", "ep")}
    return {"kind": KIND, "role": role.value, "dtype": dtype.value, "parallel": layout, "iteration": iteration}


def belongs_to_optimizer(key: str) -> bool:
    return _OPTIMIZER.match(key) is not None


def locate(entry: Entry) -> tuple[str, tuple[int, ...]]:
    """Key and place along the stacked axes: (), (layer,) or (layer, expert)."""
    if not entry.name.startswith("decoder.layers."):
        return entry.name, ()
    _, _, layer, suffix = entry.name.split(".", 3)
    if entry.expert is None:
        return f"decoder.layers.{suffix}", (int(layer),)
    weight = suffix.removeprefix(f"mlp.experts.{entry.expert}.")
    return f"decoder.layers.mlp.experts.experts.{weight}", (int(layer), entry.expert)


def compute_global_shapes(entries: Sequence[Entry], arch: Architecture, tp: int) -> Mapping[str, tuple[int, ...]]:
    """Key -> whole shape with the stacked axes."""
    stacked = (arch.num_layers, arch.experts.num_experts if arch.experts else 0)
    located = ((entry, *locate(entry)) for entry in entries)
    return {key: (*stacked[: len(index)], *compute_megatron_shape(entry, arch, tp)) for entry, key, index in located}
