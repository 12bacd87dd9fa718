"""What a role's own keys (recompute, fp8) put into Megatron's configuration, and where they cannot work.

Imports no Megatron: the checks run before any process is started.
"""

import functools
import importlib
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from typing import Any

import torch

from megarl.config.schema.roles import (
    Dtype,
    Fp8,
    Fp8Recipe,
    LoraConfig,
    LoraLayers,
    Recompute,
    RecomputeMethod,
    Trainable,
)
from megarl.mcore.model.architecture import Architecture
from megarl.mcore.worker_spec import WorkerSpec

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
        "deterministic_mode": spec.deterministic and torch.cuda.is_available(),
    }


def find_token_multiple(spec: WorkerSpec) -> int:
    """The number of tokens of a micro-batch is a multiple of this on every rank that shares it."""
    return TOKEN_MULTIPLES[spec.fp8_recipe] if spec.fp8 else 1


@functools.cache
def has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed; it also needs CUDA to run.

    With CUDA it is imported, because a half-installed package is found like a whole one. Raises RuntimeError where
    that fails: Megatron would go on without it, or end with an error that does not name it.
    """
    # Not importlib.util.find_spec: without CUDA the import hook finds it nowhere.
    if PathFinder.find_spec("transformer_engine") is None:
        return False
    if torch.cuda.is_available():
        try:
            importlib.import_module("transformer_engine.pytorch")
        except Exception as error:
            raise RuntimeError(
                f"Transformer Engine is installed and broken ({type(error).__name__}: {error}); make clean install"
                " PLATFORM=cuda installs all of it, and without it megarl computes with plain torch layers"
            ) from error
    return True


def check_role_fields(
    arch: Architecture, spec: WorkerSpec, in_worker: bool = False, on_gpu: bool = False
) -> Iterator[str]:
    """One message for each key of the role that the model or the machine cannot follow.

    in_worker: this process is the one that computes; without it only what holds on every machine is reported,
    because the ranks may have GPUs where this process has none. on_gpu: the ranks are known to have GPUs.
    """
    role = spec.role.value
    if spec.router_replay:
        yield from check_router_replay(arch, spec.megatron)
    if spec.lora is not None:
        yield from _check_lora(arch, spec, spec.lora)
    experts_alone = arch.experts is not None and not arch.experts.shared_ffn_size
    if spec.trainable is Trainable.mlp and experts_alone and spec.parallel.pp > 1:
        # Megatron's optimizer of dense weights would have none on the stages before the head, and then writes no state.
        yield (
            f"{role}.parallel.pp: found {spec.parallel.pp} with {role}.trainable=mlp, which trains nothing but experts"
            f" on stages before the last, and such a stage cannot be saved; it must be 1, or {role}.trainable=all"
        )
    if spec.recompute is Recompute.full:
        yield from _check_recompute(role, arch, spec)
    if on_gpu and spec.dtype is Dtype.float32 and spec.parallel.cp > 1 and has_transformer_engine():
        # Of its backends only the unfused one computes in float32, and it has no context parallelism
        # (transformer_engine/pytorch/attention/dot_product_attention/utils.py, get_attention_backend).
        yield (
            f"{role}.dtype: found float32 with {role}.parallel.cp={spec.parallel.cp}; on a GPU Transformer Engine's"
            f" attention has no context parallelism in float32: {role}.dtype=bfloat16, or {role}.parallel.cp=1"
        )
    if spec.fp8:
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        if in_worker or capability or not has_transformer_engine():
            yield from find_fp8_problems(role, spec.fp8, spec.fp8_recipe, has_transformer_engine(), capability)


def _check_lora(arch: Architecture, spec: WorkerSpec, lora: LoraConfig) -> Iterator[str]:
    """One message for each reason why these adapters cannot be trained."""
    if not lora.layers:
        yield "policy.lora.layers: found nothing; it must be attention, mlp or both"
    if arch.experts is not None and LoraLayers.mlp in lora.layers:
        yield "policy.lora.layers: found mlp; experts have no adapters: policy.lora.layers=[attention]"
    if arch.output_norms:
        yield (
            f"policy.lora.rank: found {lora.rank}; a model with norms of its layers' outputs ({arch.family}) has no"
            " adapters; it must be 0"
        )
    if spec.fp8:
        yield f"policy.fp8: found {spec.fp8.value} with policy.lora.rank={lora.rank}; adapters need null"


def check_router_replay(arch: Architecture, megatron: Mapping[str, Any]) -> Iterator[str]:
    """One message for each reason why the policy cannot replay its routes. megatron: model.megatron."""
    if arch.experts is None:
        yield "rollout.router_replay: found true, but the model has no experts; it must be false"
    if megatron.get("moe_router_fusion"):
        yield (
            "model.megatron.moe_router_fusion: found true with rollout.router_replay, whose experts the fused router"
            " does not take; it must be false"
        )


def _check_recompute(role: str, arch: Architecture, spec: WorkerSpec) -> Iterator[str]:
    pieces = spec.parallel.pp * spec.parallel.vpp
    layers, found = arch.num_layers // pieces, spec.recompute_num_layers
    where = f"{arch.num_layers} layers" if pieces == 1 else f"{layers} layers of each of the {pieces} pipeline stages"
    if spec.recompute_method is RecomputeMethod.uniform and layers % found:
        nearest = max(n for n in range(1, layers + 1) if layers % n == 0 and n <= max(1, found))
        yield f"{role}.recompute_num_layers: found {found}, which does not divide the {where}; {nearest} does"
    elif found > layers:
        yield f"{role}.recompute_num_layers: found {found}; there are {where}"


def find_fp8_problems(
    role: str, fp8: Fp8, recipe: Fp8Recipe, with_te: bool, capability: tuple[int, int] | None
) -> Iterator[str]:
    """Why FP8 products of this recipe cannot be computed; nothing where they can.

    with_te: Transformer Engine is installed. capability: compute capability of the GPU, None without one.
    Megatron itself would go on without FP8.
    """
    needed = COMPUTE_CAPABILITIES[recipe]
    asked = f"{role}.fp8: found {fp8.value}"
    if not with_te:
        yield f"{asked}; it needs Transformer Engine, which is not installed (make install PLATFORM=cuda), or null"
    elif capability is None:
        yield f"{asked}; it needs a GPU and there is none here; null computes without it"
    elif capability < needed:
        others = [r.value for r, least in COMPUTE_CAPABILITIES.items() if capability >= least]
        hint = f"; {role}.fp8_recipe may be {' or '.join(others)} here" if others else "; null computes without it"
        yield (
            f"{role}.fp8_recipe: found {recipe.value}; it needs a GPU of compute capability {_dotted(needed)} or more,"
            f" and this one has {_dotted(capability)}{hint}"
        )


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
