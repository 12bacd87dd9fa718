"""The architecture of a checkpoint directory, and which parallel layouts fit it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.config.checks.parallel import find_nearest_divisor
from megarl.config.schema.roles import ParallelConfig
from megarl.json_text import load_json_object
from megarl.models.architecture import Architecture, Experts
from megarl.models.families import parse_architecture

__all__ = ["Architecture", "Experts", "check_layout", "parse_architecture", "read_architecture"]


def check_layout(
    arch: Architecture, parallel: ParallelConfig, key: str, megatron: Mapping[str, Any] | None = None
) -> list[str]:
    """What of the model the layout under the configuration key `key` does not divide; one message each.

    megatron: model.megatron, which may say how many layers the first and last stage have.
    """
    problems = []
    fitting = [tp for tp in range(1, arch.num_heads + 1) if not _find_undivided(arch, tp)]
    for name in _find_undivided(arch, parallel.tp):
        nearest = min(fitting, key=lambda tp: (abs(tp - parallel.tp), tp))
        problems.append(f"{key}.tp: found {parallel.tp}, which does not divide {name}; the nearest is {nearest}")
    problems += _check_stages(arch, parallel, key, megatron or {})
    if parallel.sp and parallel.tp == 1:
        problems.append(f"{key}.sp: found true with tp 1; it splits what tensor parallelism leaves whole")
    return [*problems, *_check_expert_layout(arch.experts, parallel, key)]


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


# With these Megatron itself knows better which layers a stage has.
_STAGE_OPTIONS = (
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def _check_stages(arch: Architecture, parallel: ParallelConfig, key: str, megatron: Mapping[str, Any]) -> Iterator[str]:
    """The first and the last stage may have numbers of layers of their own; the others share what is left."""
    if any(megatron.get(option) for option in _STAGE_OPTIONS):
        return
    options = [f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last")]
    own = [megatron[option] for option in options if megatron.get(option) is not None]
    layers, stages = arch.num_layers - sum(own), parallel.pp - len(own)
    if own and (stages < 0 or layers < 0 or (stages == 0) != (layers == 0)):
        yield (
            f"{key}.pp: found {parallel.pp}, with {' and '.join(map(str, own))} of the model's {arch.num_layers} layers"
            f" in the first and last stage (model.megatron.{options[0]} and .{options[1]}); {layers} layers are left"
            f" for {stages} stages"
        )
        return
    if stages and layers % stages:
        nearest = find_nearest_divisor(layers, stages) + len(own)
        yield (
            f"{key}.pp: found {parallel.pp}, which does not divide the model's {layers} layers"
            f"{' outside the first and last stage' if own else ''}; the nearest is {nearest}, or give the first and"
            f" last stage numbers of their own (model.megatron.{options[0]} and .{options[1]})"
        )
        return
    for number in [*own, *([layers // stages] if stages else [])]:
        if number % parallel.vpp:
            yield (
                f"{key}.vpp: found {parallel.vpp}, which does not divide the {number} layers of a stage; the nearest is"
                f" {find_nearest_divisor(number, parallel.vpp)}"
            )


def _check_expert_layout(experts: Experts | None, parallel: ParallelConfig, key: str) -> list[str]:
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
    if parallel.tp > 1 and not parallel.sp:
        # Without it every tensor-parallel rank would send the same tokens to the experts.
        problems.append(f"{key}.sp: found false with tp {parallel.tp}; a model of experts needs true")
    return problems


def read_architecture(directory: Path) -> Architecture:
    """Read DIRECTORY/config.json.

    Raises FileNotFoundError where it is missing, ValueError that names the key where the model is of no family here
    or uses something that is not built.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not found; a Hugging Face checkpoint directory is expected")
    return parse_architecture(load_json_object(path), path)
