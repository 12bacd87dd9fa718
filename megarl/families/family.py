"""The descriptor of a family of models: everything that is known of the family alone.

The mapping of Hugging Face checkpoints, the plan of the weight sync, the planner, the random models and the export read
it and name no family themselves. docs/extending/model-family.md says how to add one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.config.schema.model import RandomModelConfig
from megarl.families.architecture import Architecture
from megarl.families.config_json import ConfigJson
from megarl.families.weights import Weight, pre_norm_layer


def no_fields(_: Any) -> dict[str, Any]:
    return {}


def with_head_size(random: RandomModelConfig) -> dict[str, Any]:
    """The key of families whose heads need not be hidden_size / num_heads wide."""
    return {"head_dim": random.hidden_size // random.num_heads}


@dataclass(frozen=True)
class Family:
    """What a file of this folder holds, under the name FAMILY."""

    name: str
    """model_type of config.json"""
    hf_class: str
    """What the names of its classes in transformers begin with: Qwen3 of Qwen3Config, Qwen3ForCausalLM"""
    sglang_module: str
    """The module of sglang.srt.models that serves it"""
    read: Callable[[ConfigJson], Architecture]
    """Raises ValueError, naming the key, for what is not built here"""
    list_weights: Callable[[Architecture, int], list[Weight]] = pre_norm_layer
    """The tensors of a layer, by its number from 0"""
    megatron_fields: Callable[[Architecture], dict[str, Any]] = no_fields
    """Fields of Megatron's TransformerConfig besides those that follow from the architecture"""
    random_fields: Callable[[RandomModelConfig], dict[str, Any]] = no_fields
    """Keys of the config.json of a random model besides those that all families have"""
    has_experts: bool = False
    only_values: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that `read` does not read, each with the value, or a tuple of those, that it must have where
    it is there; beside `config_json.ONLY_VALUES`"""
    server_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the SGLang server without which it would hold other tensors than the table says"""
