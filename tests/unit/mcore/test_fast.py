"""Which of Megatron's faster ways are on, why others are not, and that Megatron itself has the same conditions."""

import ast
import importlib.util
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import write_checkpoint

from megarl.config.schema.roles import Dtype, OptimizerConfig, ParallelConfig
from megarl.mcore import model
from megarl.mcore.layers import (
    Kernels,
    build_fast_fields,
    check_fast_fields,
    find_kernels,
    fuse_weight_gradients,
    resolve_overlap,
)
from megarl.mcore.model import build_config
from megarl.mcore.spec import read_architecture
from megarl.models.architecture import Architecture

TransformerConfig = model.TransformerConfig
NOTHING = Kernels()
EVERYTHING = Kernels(**{field.name: True for field in dataclass_fields(Kernels)})
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")


@pytest.fixture(scope="module")
def archs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Architecture]:
    found = {}
    for family in ("qwen3", "glm4", "qwen3_moe", "glm4_moe"):
        path = tmp_path_factory.mktemp(family)
        write_checkpoint(path, family)
        found[family] = read_architecture(path)
    return found


def test_with_every_kernel_everything_is_on(archs: dict[str, Architecture]) -> None:
    dense = dict.fromkeys(("apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion"), True)
    assert build_fast_fields(archs["qwen3"], {}, EVERYTHING) == dense
    assert build_fast_fields(archs["qwen3_moe"], {}, EVERYTHING) == dense | {"moe_permute_fusion": True}
    known = {field.name for field in dataclass_fields(TransformerConfig)}
    assert set(build_fast_fields(archs["qwen3_moe"], {}, EVERYTHING)) <= known


@pytest.mark.parametrize(
    ("family", "megatron", "lacks", "off"),
    [
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
    assert {field for field, is_on in fields.items() if not is_on} == off


@on_cpu
@pytest.mark.parametrize(
    ("megatron", "is_fused", "is_local"),
    [
        ({}, False, True),
        ({"bias_activation_fusion": True}, True, None),
        ({"activation_func_clamp_value": 1.0}, False, False),
        ({"glu_linear_offset": 1.0}, False, False),
    ],
)
def test_mlps_have_the_local_activation_unless_another_one_or_its_fusion_is_asked_for(
    archs: dict[str, Architecture], megatron: dict[str, Any], is_fused: bool, is_local: bool | None
) -> None:
    config = build_config(archs["qwen3"], ParallelConfig(), Dtype.float32, megatron)
    assert config.bias_activation_fusion == is_fused
    assert is_local is None or config.use_te_activation_func == is_local


def test_fused_rope_of_interleaved_positions_is_refused_on_every_machine(archs: dict[str, Architecture]) -> None:
    assert list(check_fast_fields(archs["qwen3"], {"apply_rope_fusion": True})) == []
    (problem,) = check_fast_fields(archs["glm4"], {"apply_rope_fusion": True})
    assert problem.startswith("model.megatron.apply_rope_fusion: found true, but the model turns neighbouring")


def test_dispatchers_that_ask_for_microbatches_of_one_length_are_refused(archs: dict[str, Architecture]) -> None:
    config = build_config(archs["qwen3_moe"], ParallelConfig(), Dtype.float32, {})
    assert config.moe_token_dispatcher_type == "alltoall"
    with pytest.raises(ValueError, match=r"moe_token_dispatcher_type: found 'allgather'; it must be alltoall or flex"):
        build_config(archs["qwen3_moe"], ParallelConfig(), Dtype.float32, {"moe_token_dispatcher_type": "allgather"})


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


def test_only_layers_that_can_are_told_to_add_up_their_weight_gradients() -> None:
    class Linear(torch.nn.Linear):
        """As Transformer Engine's layers have it (2.20: Linear, LayerNormLinear, GroupedLinear)."""

        fuse_wgrad_accumulation = False

    model = torch.nn.Sequential(Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Sequential(Linear(2, 2)))
    assert fuse_weight_gradients(model) == 2
    assert model[0].fuse_wgrad_accumulation
    assert model[2][0].fuse_wgrad_accumulation
    assert not hasattr(model[1], "fuse_wgrad_accumulation")


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


def test_megatrons_fused_rope_of_packed_sequences_still_has_no_interleaved_argument() -> None:
    """Where it gets one, `find_reasons` need not switch fused rope off for GLM-4."""
    spec = importlib.util.find_spec("megatron.core.extensions")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    source = Path(next(iter(spec.submodule_search_locations))) / "transformer_engine.py"
    names = {
        argument.arg
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "fused_apply_rotary_pos_emb_thd"
        for argument in node.args.args
    }
    assert names == {"t", "cu_seqlens", "freqs", "cp_size", "cp_rank"}


@on_cpu
def test_the_swiglu_that_is_fused_computes_what_the_plain_one_does() -> None:
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, weighted_bias_swiglu_impl

    torch.manual_seed(0)
    x, weights, grad = torch.randn(7, 1, 24, dtype=torch.float64), torch.rand(7, 1, 1, dtype=torch.float64), None
    results = []
    for fused in (True, False):
        leaf, weight = x.clone().requires_grad_(), weights.clone().requires_grad_()
        gate, up = leaf.chunk(2, -1)
        plain = torch.nn.functional.silu(gate) * up
        out = bias_swiglu_impl(leaf, None) if fused else plain
        weighted = weighted_bias_swiglu_impl(leaf[:, 0], None, weight[:, 0]) if fused else (plain * weight)[:, 0]
        grad = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out) if grad is None else grad
        ((out * grad).sum() + (weighted * grad[:, 0]).square().sum()).backward()
        results.append((out.detach(), weighted.detach(), leaf.grad, weight.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
