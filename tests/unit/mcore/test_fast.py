"""Which of Megatron's faster ways are on, why others are not, and that Megatron itself has the same conditions."""

from dataclasses import fields as dataclass_fields
from dataclasses import replace
from typing import Any

import pytest
import torch

from megarl.config.schema.roles import Dtype, OptimizerConfig, ParallelConfig, RandomModelConfig
from megarl.mcore import model
from megarl.mcore.layers import Kernels, build_fast_fields, check_fast_fields, find_kernels, resolve_overlap
from megarl.models.architecture import Architecture
from megarl.models.families import FAMILIES
from megarl.plan.job import describe_random

TransformerConfig = model.TransformerConfig
EVERYTHING = Kernels(**{field.name: True for field in dataclass_fields(Kernels)})
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")


@pytest.fixture(scope="module")
def archs() -> dict[str, Architecture]:
    return {family: describe_random(RandomModelConfig(family=family)) for family in FAMILIES}


@pytest.mark.parametrize(
    ("family", "megatron", "lacks", "off"),
    [
        ("qwen3", {}, "", set()),
        ("qwen3_moe", {}, "", set()),
        ("qwen3_moe", {}, "permute", {"moe_permute_fusion"}),
        ("qwen3", {}, "rope", {"apply_rope_fusion"}),
        ("glm4", {}, "", {"apply_rope_fusion"}),
        ("qwen3", {}, "compiler", {"bias_activation_fusion"}),
        ("qwen3", {"use_te_activation_func": True}, "", {"bias_activation_fusion"}),
        ("qwen3", {}, "apex", set()),
        ("qwen3_moe", {}, "te", {"apply_rope_fusion", "moe_permute_fusion"}),
        ("qwen3", {}, "gpu", {"apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion"}),
    ],
)
def test_each_way_is_off_alone_where_its_condition_does_not_hold(
    archs: dict[str, Architecture], family: str, megatron: dict[str, Any], lacks: str, off: set[str]
) -> None:
    kernels = replace(EVERYTHING, **({lacks: False} if lacks else {}))
    fields = build_fast_fields(archs[family], megatron, kernels)
    assert fields.keys() <= {field.name for field in dataclass_fields(TransformerConfig)}
    assert {field for field, is_on in fields.items() if not is_on} == off


def test_fused_rope_of_interleaved_positions_is_refused_on_every_machine(archs: dict[str, Architecture]) -> None:
    assert list(check_fast_fields(archs["qwen3"], {"apply_rope_fusion": True})) == []
    (problem,) = check_fast_fields(archs["glm4"], {"apply_rope_fusion": True})
    assert problem.startswith("model.megatron.apply_rope_fusion: found true, but the model turns neighbouring")


@pytest.mark.parametrize(
    ("given", "num_processes", "tp", "gpu", "expected"),
    [
        ((None, None), 2, 1, True, (True, True)),
        ((None, None), 2, 1, False, (False, False)),
        ((None, None), 1, 1, True, (False, False)),
        ((None, None), 2, 2, True, (False, False)),
        ((False, None), 2, 1, True, (False, False)),
        ((None, False), 2, 1, True, (True, False)),
        ((True, None), 2, 1, False, (True, False)),
        ((None, True), 2, 1, False, (True, True)),
        ((True, True), 1, 1, True, (True, True)),
    ],
)
def test_overlap_is_automatic_on_gpus_that_share_gradients_and_as_given_elsewhere(
    given: tuple[bool | None, bool | None], num_processes: int, tp: int, gpu: bool, expected: tuple[bool, bool]
) -> None:
    optimizer = OptimizerConfig(overlap_grad_reduce=given[0], overlap_param_gather=given[1])
    found = resolve_overlap(optimizer, ParallelConfig(num_processes=num_processes, tp=tp), gpu)
    assert (found.overlap_grad_reduce, found.overlap_param_gather) == expected


@on_cpu
@pytest.mark.parametrize("field", ["apply_rope_fusion", "moe_permute_fusion"])
def test_megatron_itself_refuses_what_is_off_for_want_of_a_kernel(archs: dict[str, Architecture], field: str) -> None:
    """The kernels that are looked for are those that Megatron asks for."""
    arch = archs["qwen3_moe"]
    own = model._own_fields(arch, ParallelConfig(), Dtype.float32) | model._DEFAULTS
    TransformerConfig(**own)
    if build_fast_fields(arch, {}, replace(find_kernels(), gpu=True, te=True))[field]:
        assert getattr(TransformerConfig(**own, **{field: True}), field)
    else:
        with pytest.raises((ValueError, ImportError), match="fus"):
            TransformerConfig(**own, **{field: True})
