"""What a Megatron worker is told and what it gives back: plain data, imports no Megatron."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor

from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.roles import (
    Dtype,
    Fp8,
    Fp8Recipe,
    LoraConfig,
    Offload,
    OptimizerConfig,
    ParallelConfig,
    Recompute,
    RecomputeMethod,
    Trainable,
)

CRITIC_PROMPT = "megarl_critic_prompt"
"""Key of a critic's config.json: data.critic_prompt, with which it was trained, or null; other models do not have it"""
VALUE_RANGE = "megarl_value_range"
"""Key of config.json: critic.value_range, of a critic that has one. transformers keeps it and does not know it: its
classifier gives the head's output z."""


class Role(Enum):
    policy = "policy"
    critic = "critic"
    reference = "reference"


@dataclass(frozen=True)
class WorkerSpec:
    """One role, the same on all its ranks."""

    role: Role
    checkpoint: str
    """Hugging Face checkpoint directory that the weights start from"""
    parallel: ParallelConfig
    optimizer: OptimizerConfig | None
    """None for the reference, which is not trained"""
    dtype: Dtype
    algo: AlgoConfig
    temperature: float
    """Temperature of the distribution that the policy loss is about"""
    response_length: int
    """Configured maximum, in tokens"""
    tokens_per_microbatch: int
    seed: int = 1
    megatron: dict[str, Any] = field(default_factory=dict)
    """model.megatron: further fields of Megatron's TransformerConfig"""
    num_threads: int = 1
    """CPU threads; without effect on a GPU"""
    deadline_s: float = 1800.0
    """Longest wait for a call; a collective in it may take somewhat longer"""
    recompute: Recompute = Recompute.none
    recompute_method: RecomputeMethod = RecomputeMethod.uniform
    recompute_num_layers: int = 1
    offload: Offload | None = None
    fp8: Fp8 | None = None
    fp8_recipe: Fp8Recipe = Fp8Recipe.blockwise
    router_replay: bool = False
    """Of the policy alone: its routers take the experts that come with the sequences"""
    critic_prompt: str | None = None
    """Of the critic alone: data.critic_prompt, which its checkpoints record"""
    trainable: Trainable = Trainable.all
    """Of the critic: which weights are trained"""
    lora: LoraConfig | None = None
    """Of the policy: the adapters that are trained in place of its weights; None: there are none"""
    value_range: tuple[float, float] | None = None
    """Of the critic: the bounds of its values, which its checkpoints record; None: they have none"""
    deterministic: bool = False
    """Compute the same from the same on a GPU; without effect on a CPU, which does so anyway"""

    @property
    def critic_fields(self) -> dict[str, Any]:
        """What config.json of a critic says besides."""
        bounds = {} if self.value_range is None else {VALUE_RANGE: list(self.value_range)}
        return {CRITIC_PROMPT: self.critic_prompt, **bounds}


@dataclass(frozen=True)
class RowsResult:
    """What one data-parallel rank computed."""

    rows: Tensor
    """int64 [b]: which rows of the sequences"""
    values: Tensor
    """float32 [b, T], 0 past the response; T is the longest response of all sequences"""


@dataclass(frozen=True)
class StageParameters:
    """What each rank of one pipeline stage holds; the ranks of a stage hold equally much."""

    num_layers: int
    """Layers of all its pieces of the model"""
    dense: int
    """Parameters of which every data- and context-parallel rank has a copy"""
    experts: int
    """Parameters of experts"""
    embedding: int
    """The part of `dense` in the input embedding, or a tied output layer's copy of it"""
    head: int
    """The part of `dense` in the output layer or value head"""
    mlp: int = 0
    """The part of `dense` in MLPs and shared experts"""

    @property
    def total(self) -> int:
        return self.dense + self.experts
