"""The `policy`, `critic` and `reference` nodes: one Megatron model each, with a layout and an optimizer of its own."""

from dataclasses import dataclass, field
from enum import Enum


class Dtype(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class LrDecay(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass
class ParallelConfig:
    """Megatron's layout of one role; data parallelism is what is left: num_processes / (tp * pp)."""

    num_processes: int = 1
    tp: int = 1
    pp: int = 1
    sp: bool = False


@dataclass
class OptimizerConfig:
    """AdamW with Megatron's distributed optimizer."""

    lr: float = 1e-6
    min_lr: float = 0.0
    warmup_steps: int = 0
    decay: LrDecay = LrDecay.constant
    decay_steps: int | None = None
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0


@dataclass
class PolicyConfig:
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    dtype: Dtype = Dtype.bfloat16


@dataclass
class CriticConfig:
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=2e-6))
    dtype: Dtype = Dtype.bfloat16
    updates_per_policy_update: int = 1
    """Passes of the critic over the minibatches for each pass of the policy."""
    init: str | None = None
    """Hugging Face checkpoint the critic starts from: a pretrained critic (RUN_DIR/critic) or a reward model with one
    label. null: the policy's weights with a new value head."""


@dataclass
class ReferenceConfig:
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    dtype: Dtype = Dtype.bfloat16
