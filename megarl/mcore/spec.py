"""What a role's ranks are told and give back, the model that they compute, and what they cannot do. It imports no
Megatron: checks run before any process is started.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from torch import Tensor

from megarl.config.checks import find_nearest_divisor
from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.roles import (
    Dtype,
    Fp8,
    Fp8Recipe,
    LoraConfig,
    LoraLayers,
    Offload,
    OptimizerConfig,
    ParallelConfig,
    Recompute,
    RecomputeMethod,
    Trainable,
)
from megarl.files import load_json_object
from megarl.mcore.device import find_processor
from megarl.models.architecture import Architecture, Experts
from megarl.models.families import parse_architecture


def check_layout(
    arch: Architecture, parallel: ParallelConfig, key: str, megatron: Mapping[str, Any] | None = None
) -> list[str]:
    """What of the model the layout under the configuration key `key` does not divide; one message each. megatron:
    model.megatron, which may say how many layers the first and last stage have.
    """
    problems = []
    fitting = [tp for tp in range(1, arch.num_heads + 1) if not _find_undivided(arch, tp)]
    for name in _find_undivided(arch, parallel.tp):
        nearest = min(fitting, key=lambda tp: (abs(tp - parallel.tp), tp))
        problems.append(f"{key}.tp: found {parallel.tp}, which does not divide {name}; the nearest is {nearest}")
    problems += _check_stages(arch, parallel, key, megatron or {})
    if parallel.sp and parallel.tp == 1:
        problems.append(f"{key}.sp: found true with tp 1; it splits what tensor parallelism leaves whole")
    return [*problems, *_check_expert_layout(arch.experts, arch.has_biases, parallel, key)]


def _find_undivided(arch: Architecture, tp: int) -> list[str]:
    """What tensor parallelism cannot split. Megatron repeats key-value heads where there are fewer than ranks."""
    kv_heads = arch.num_kv_heads
    rows = {
        f"the model's {arch.num_heads} attention heads": arch.num_heads % tp,
        f"the model's {kv_heads} key-value heads": kv_heads % tp and tp % kv_heads,
        "the rows of its query, key and value weights": (arch.num_heads + 2 * kv_heads) * arch.head_size % tp,
        **{f"its {size} rows of {what}": size % tp for what, size in arch.mlp_sizes.items()},
    }
    return [name for name, rest in rows.items() if rest]


_STAGE_OPTIONS = (
    *("pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split"),
    *("account_for_loss_in_pipeline_split", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
)
"""Fields of model.megatron by which stages differ, and which Megatron itself checks"""


def _check_stages(arch: Architecture, parallel: ParallelConfig, key: str, megatron: Mapping[str, Any]) -> Iterator[str]:
    if any(megatron.get(option) is not None for option in _STAGE_OPTIONS):
        return
    if arch.num_layers % parallel.pp:
        yield (
            f"{key}.pp: found {parallel.pp}, which does not divide the model's {arch.num_layers} layers; the nearest is"
            f" {find_nearest_divisor(arch.num_layers, parallel.pp)}, or give the first and last stage numbers of their"
            f" own (model.megatron.{_STAGE_OPTIONS[3]} and .{_STAGE_OPTIONS[4]})"
        )
    elif (number := arch.num_layers // parallel.pp) % parallel.vpp:
        yield (
            f"{key}.vpp: found {parallel.vpp}, which does not divide the {number} layers of a stage; the nearest is"
            f" {find_nearest_divisor(number, parallel.vpp)}"
        )


def _check_expert_layout(experts: Experts | None, has_biases: bool, parallel: ParallelConfig, key: str) -> list[str]:
    if experts is None:
        return [
            f"{key}.{name}: found {value}, but the model has no experts; it must be 1"
            for name, value in (("ep", parallel.ep), ("etp", parallel.etp))
            if value != 1
        ]
    problems = []
    for name, value, number, what in (
        ("ep", parallel.ep, experts.num_experts, "experts"),
        ("etp", parallel.etp, experts.ffn_size, "rows of each expert"),
    ):
        if number % value:
            problems.append(f"{key}.{name}: found {value}, which does not divide the model's {number} {what}")
    if has_biases and parallel.etp > 1:
        problems.append(f"{key}.etp: found {parallel.etp}; Megatron does not split experts with biases; it must be 1")
    if parallel.tp > 1 and not parallel.sp:
        # Without it every tensor-parallel rank would send the same tokens to the experts.
        problems.append(f"{key}.sp: found false with tp {parallel.tp}; a model of experts needs true")
    return problems


def read_architecture(directory: Path) -> Architecture:
    """Read DIRECTORY/config.json. Raises FileNotFoundError where it is missing, ValueError for what is not built."""
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not found; a Hugging Face checkpoint directory is expected")
    return parse_architecture(load_json_object(path), path)


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
    tokens_per_microbatch: int
    seed: int = 1
    megatron: dict[str, Any] = field(default_factory=dict)
    num_threads: int = 1
    deadline_s: float = 1800.0
    """Longest wait for a call; a collective in it may take somewhat longer"""
    collective_deadline_s: float | None = None
    """Of a collective in it; None: somewhat longer than the call may take"""
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
    """Of the critic alone"""
    lora: LoraConfig | None = None
    """Of policy and critic, whose value head is trained too; None: all of `trainable` is trained"""
    teachers: tuple[str, ...] = ()
    """Of the reference alone: further checkpoints of its architecture, any of which may score"""
    value_range: tuple[float, float] | None = None
    """Of the critic alone; its checkpoints record it"""
    deterministic: bool = False

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
    dense: int
    """Parameters of which every data- and context-parallel rank has a copy"""
    experts: int
    embedding: int
    """The part of `dense` in the input embedding, or a tied output layer's copy of it"""
    head: int
    """The part of `dense` in the output layer or value head"""
    mlp: int = 0
    """The part of `dense` in MLPs and shared experts"""

    @property
    def total(self) -> int:
        return self.dense + self.experts


ROLE_KEYS = {
    "recompute_granularity": "recompute",
    "recompute_method": "recompute_method",
    "recompute_num_layers": "recompute_num_layers",
    "fp8": "fp8",
    "fp8_recipe": "fp8_recipe",
}
"""Fields of TransformerConfig that a key of the role decides; its workers are told the keys under the same names."""

COMPUTE_CAPABILITIES = {
    Fp8Recipe.tensorwise: (8, 9),
    Fp8Recipe.blockwise: (9, 0),
    Fp8Recipe.mxfp8: (10, 0),
}
"""The least a GPU must have for a recipe: Ada, Hopper, Blackwell (Transformer Engine's own conditions)."""

TOKEN_MULTIPLES = {Fp8Recipe.tensorwise: 16, Fp8Recipe.blockwise: 128, Fp8Recipe.mxfp8: 32}
"""Number of tokens of which an FP8 product takes multiples: the block of a recipe, 16 for one scale per tensor."""


def build_role_fields(spec: WorkerSpec) -> dict[str, Any]:
    """The fields of TransformerConfig that `spec`'s keys decide: those of `ROLE_KEYS`, and deterministic_mode."""
    full = spec.recompute is Recompute.full
    return {
        "recompute_granularity": None if spec.recompute is Recompute.none else spec.recompute.value,
        "recompute_method": spec.recompute_method.value if full else None,
        "recompute_num_layers": spec.recompute_num_layers if full else None,
        "fp8": spec.fp8.value if spec.fp8 else None,
        "fp8_recipe": spec.fp8_recipe.value,
        "deterministic_mode": spec.deterministic and not find_processor().repeats,
    }


def choose_recomputed(has_experts: bool, *, on_gpu: bool) -> tuple[str, ...]:
    """The parts of a layer that recompute=selective computes again where model.megatron.recompute_modules names none.

    Megatron's own choice is attention, of which Transformer Engine's fused kernels keep the inputs and outputs alone.
    """
    if not on_gpu:
        return ("core_attn",)
    return ("layernorm", "moe_act") if has_experts else ("layernorm", "mlp")


def find_token_multiple(spec: WorkerSpec) -> int:
    """The number of tokens of a micro-batch is a multiple of this on every rank that shares it."""
    return TOKEN_MULTIPLES[spec.fp8_recipe] if spec.fp8 else 1


@functools.cache
def has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed; it also needs CUDA to run. Raises RuntimeError where it is broken."""
    # Not importlib.util.find_spec: without CUDA the import hook finds it nowhere.
    if PathFinder.find_spec("transformer_engine") is None:
        return False
    find_processor().import_engine()
    return True


def check_role_fields(arch: Architecture, spec: WorkerSpec, in_worker: bool = False) -> Iterator[str]:
    """One message for each key of the role that the model or the machine cannot follow. in_worker: this process is the
    one that computes; elsewhere only what holds on every machine is reported, since the ranks may have other GPUs.
    """
    role = spec.role.value
    if spec.router_replay:
        yield from check_router_replay(arch)
    if spec.lora is not None:
        yield from _check_lora(arch, spec, spec.lora)
    experts_alone = arch.experts is not None and not arch.experts.shared_ffn_size
    if spec.trainable is Trainable.mlp and spec.lora is None and experts_alone and spec.parallel.pp > 1:
        # Megatron's optimizer of dense weights would have none on the stages before the head, and then writes no state.
        yield (
            f"{role}.parallel.pp: found {spec.parallel.pp} with {role}.trainable=mlp, which trains nothing but experts"
            f" on stages before the last, and such a stage cannot be saved; it must be 1, or {role}.trainable=all"
        )
    if spec.recompute is Recompute.full:
        yield from _check_recompute(role, arch, spec)
    if spec.fp8:
        yield from check_engine(spec, has_transformer_engine(), find_processor().capability, in_worker)


def _check_lora(arch: Architecture, spec: WorkerSpec, lora: LoraConfig) -> Iterator[str]:
    """Why these adapters cannot be trained."""
    role = spec.role.value
    if not lora.layers:
        yield f"{role}.lora.layers: found nothing; it must be attention, mlp or both"
    if arch.experts is not None and LoraLayers.mlp in lora.layers:
        yield f"{role}.lora.layers: found mlp; experts have no adapters: {role}.lora.layers=[attention]"
    if arch.output_norms or arch.latent is not None:
        what = "norms of its layers' outputs" if arch.output_norms else "latent attention"
        yield f"{role}.lora.rank: found {lora.rank}; a model with {what} ({arch.family}) has no adapters; it must be 0"
    if spec.fp8:
        yield f"{role}.fp8: found {spec.fp8.value} with {role}.lora.rank={lora.rank}; adapters need null"


def check_router_replay(arch: Architecture) -> Iterator[str]:
    """Why the policy cannot replay its routes."""
    if arch.experts is None:
        yield "rollout.router_replay: found true, but the model has no experts; it must be false"


def _check_recompute(role: str, arch: Architecture, spec: WorkerSpec) -> Iterator[str]:
    pieces = spec.parallel.pp * spec.parallel.vpp
    layers, found = arch.num_layers // pieces, spec.recompute_num_layers
    where = f"{arch.num_layers} layers" if pieces == 1 else f"{layers} layers of each of the {pieces} pipeline stages"
    if spec.recompute_method is RecomputeMethod.uniform and layers % found:
        nearest = max(n for n in range(1, layers + 1) if layers % n == 0 and n <= max(1, found))
        yield f"{role}.recompute_num_layers: found {found}, which does not divide the {where}; {nearest} does"
    elif found > layers:
        yield f"{role}.recompute_num_layers: found {found}; there are {where}"


def check_engine(spec: WorkerSpec, with_te: bool, capability: tuple[int, int] | None, in_worker: bool) -> Iterator[str]:
    """What Transformer Engine, where it is installed (with_te), and this process's GPU (None: there is none) do not
    compute of the role.
    """
    role = spec.role.value
    if not spec.fp8 or not (in_worker or capability or not with_te):
        return
    # Megatron itself would go on without FP8.
    recipe, asked = spec.fp8_recipe, f"{role}.fp8: found {spec.fp8.value}"
    if not with_te:
        yield f"{asked}; it needs Transformer Engine, which is not installed (make install PLATFORM=cuda), or null"
    elif capability is None:
        yield f"{asked}; it needs a GPU and there is none here; null computes without it"
    elif capability < COMPUTE_CAPABILITIES[recipe]:
        others = [r.value for r, least in COMPUTE_CAPABILITIES.items() if capability >= least]
        hint = f"; {role}.fp8_recipe may be {' or '.join(others)} here" if others else "; null computes without it"
        needed, found = (".".join(map(str, pair)) for pair in (COMPUTE_CAPABILITIES[recipe], capability))
        yield (
            f"{role}.fp8_recipe: found {recipe.value}; it needs a GPU of compute capability {needed} or more, and this"
            f" one has {found}{hint}"
        )
