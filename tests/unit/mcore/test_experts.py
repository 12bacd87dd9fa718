"""Mixtures of experts: what config.json says of them, which layouts fit, what Megatron is told."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import build_fields

from megarl.config.schema.roles import Dtype, ParallelConfig
from megarl.mcore.entries import describe, to_hf, to_megatron
from megarl.mcore.model import build_config
from megarl.mcore.spec import check_layout
from megarl.models.architecture import Architecture, Experts
from megarl.models.families import parse_architecture

SIZES = {"num_experts": 8, "num_key_value_heads": 4, "intermediate_size": 160, "vocab_size": 100}


def read(family: str = "qwen3_moe", **changes: Any) -> Architecture:
    fields = {"model_type": family, **build_fields(family), **SIZES, **changes}
    if family == "qwen3":
        del fields["num_experts"]
    return parse_architecture({key: value for key, value in fields.items() if value is not None}, Path("config.json"))


@pytest.fixture
def arch() -> Architecture:
    return read()


def test_experts_are_read_in_the_old_and_the_new_spelling() -> None:
    expected = Experts(num_experts=8, top_k=2, ffn_size=48, normalized=True)
    assert read().experts == expected
    assert read(num_experts=None, num_local_experts=8).experts == expected
    assert read().qk_norm


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (ParallelConfig(num_processes=3, ep=3), r"p\.ep: found 3, which does not divide the model's 8 experts"),
        (ParallelConfig(num_processes=5, etp=5), r"p\.etp: found 5, which does not divide"),
        (ParallelConfig(num_processes=2, tp=2), r"p\.sp: found false with tp 2; a model of experts needs true"),
    ],
)
def test_a_layout_that_does_not_fit_the_experts_is_refused_by_key(
    arch: Architecture, parallel: ParallelConfig, message: str
) -> None:
    with pytest.raises(ValueError, match=message.replace("p\\.", "parallel\\.")):
        build_config(arch, parallel, Dtype.float32, {})


def test_a_dense_model_has_neither_expert_parallelism_nor_load_balancing() -> None:
    dense = read("qwen3")
    assert dense.experts is None
    problems = check_layout(dense, ParallelConfig(num_processes=2, ep=2), "policy.parallel")
    assert problems == ["policy.parallel.ep: found 2, but the model has no experts; it must be 1"]
    with pytest.raises(ValueError, match=r"moe_aux_loss_coeff: found 0\.1, but the model has no experts"):
        build_config(dense, ParallelConfig(), Dtype.float32, {"moe_aux_loss_coeff": 0.1})


@pytest.mark.parametrize(
    ("megatron", "message"),
    [
        ({"moe_aux_loss_coeff": -0.1}, r"moe_aux_loss_coeff: found -0\.1; it must be a number of 0 or more"),
        ({"moe_z_loss_coeff": [0.1]}, "moe_z_loss_coeff: found"),
        (
            {"moe_router_load_balancing_type": "aux_loss"},
            "moe_router_load_balancing_type: found 'aux_loss'; the checkpoint",
        ),
        ({"recompute_modules": ["core_attn", "moe"]}, "recompute_modules: found moe"),
    ],
)
def test_options_that_the_router_does_not_follow_are_refused(
    arch: Architecture, megatron: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_config(arch, ParallelConfig(), Dtype.float32, megatron)


@pytest.mark.parametrize("etp", [1, 2, 4])
@pytest.mark.parametrize("weight", ["linear_fc1.weight", "linear_fc2.weight"])
def test_an_experts_weights_come_back_from_their_shards(arch: Architecture, weight: str, etp: int) -> None:
    entry = describe(f"decoder.layers.1.mlp.experts.5.{weight}", arch, with_value_head=False)
    assert all(name.startswith("model.layers.1.mlp.experts.5.") for name in entry.hf_names)
    assert entry.expert == 5
    shape = (48, 64) if weight == "linear_fc1.weight" else (64, 48)
    whole = [torch.randn(shape) for _ in entry.hf_names]
    shards = [to_megatron(entry, whole, arch, etp, rank) for rank in range(etp)]
    assert len({shard.shape for shard in shards}) == 1
    for (name, found), expected_name, expected in zip(to_hf(entry, shards, arch), entry.hf_names, whole, strict=True):
        assert name == expected_name
        assert torch.equal(found, expected)
