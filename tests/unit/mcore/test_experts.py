"""Mixtures of experts: what config.json says of them, which layouts fit, what Megatron is told."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema.roles import Dtype, ParallelConfig
from megarl.mcore.entries import describe, to_hf, to_megatron
from megarl.mcore.model import build_config
from megarl.mcore.spec import check_layout, read_architecture
from megarl.models.architecture import Architecture, Experts

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 160,
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 100,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

NO_EXPERTS = dict.fromkeys(
    ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob", "decoder_sparse_step")
)


def read(directory: Path, **changes: Any) -> Architecture:
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    return read_architecture(directory)


@pytest.fixture
def arch(tmp_path: Path) -> Architecture:
    return read(tmp_path)


def test_experts_are_read_in_the_old_and_the_new_spelling(tmp_path: Path) -> None:
    expected = Experts(num_experts=8, top_k=2, ffn_size=48, normalized=True)
    assert read(tmp_path).experts == expected
    assert read(tmp_path, num_experts=None, num_local_experts=8).experts == expected
    assert read(tmp_path).qk_norm


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2; only 1"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ({"num_experts_per_tok": 1}, "norm_topk_prob must be false"),
    ],
)
def test_a_mixture_that_is_not_built_is_refused_by_key(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, **changes)


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


def test_a_dense_model_has_no_expert_parallelism(tmp_path: Path) -> None:
    dense = read(tmp_path, model_type="qwen3", **NO_EXPERTS)
    assert dense.experts is None
    problems = check_layout(dense, ParallelConfig(num_processes=2, ep=2), "policy.parallel")
    assert problems == ["policy.parallel.ep: found 2, but the model has no experts; it must be 1"]


@pytest.mark.parametrize(
    ("megatron", "message"),
    [
        ({"moe_aux_loss_coeff": -0.1}, r"moe_aux_loss_coeff: found -0\.1; it must be a number of 0 or more"),
        ({"moe_z_loss_coeff": [0.1]}, "moe_z_loss_coeff: found"),
        ({"moe_router_load_balancing_type": "aux_loss"}, "moe_router_load_balancing_type: decided"),
        ({"recompute_modules": ["core_attn", "moe"]}, "recompute_modules: found moe"),
    ],
)
def test_options_that_the_router_does_not_follow_are_refused(
    arch: Architecture, megatron: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_config(arch, ParallelConfig(), Dtype.float32, megatron)


def test_a_load_balancing_term_of_a_dense_model_is_refused(tmp_path: Path) -> None:
    dense = read(tmp_path, model_type="qwen3", **NO_EXPERTS)
    with pytest.raises(ValueError, match=r"moe_aux_loss_coeff: found 0\.1, but the model has no experts"):
        build_config(dense, ParallelConfig(), Dtype.float32, {"moe_aux_loss_coeff": 0.1})


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
