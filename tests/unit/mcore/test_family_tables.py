"""What the descriptors of the families read of config.json, and what they refuse."""

from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import build_fields

from megarl.config.errors import ConfigError
from megarl.config.schema.model import RandomModelConfig
from megarl.families.registry import FAMILIES, list_weights, parse_architecture
from megarl.hf.random_model import build_random_checkpoint
from megarl.mcore.model.architecture import Architecture
from megarl.mcore.weights.entries import describe, list_entries


def read(family: str, **changes: Any) -> Architecture:
    return parse_architecture({"model_type": family, **build_fields(family), **changes}, Path("config.json"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 2}, "config.json: n_group is 2; only 1 is supported"),
        ({"topk_group": 2}, "topk_group is 2"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False; only True"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1; only 0"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, num_experts 4"),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace is 2; it must be below num_hidden_layers, 2"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
    ],
)
def test_a_glm4_moe_that_is_not_built_is_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read("glm4_moe", **changes)


def test_the_first_layers_of_glm4_moe_are_dense_and_the_others_have_shared_experts_and_a_bias() -> None:
    arch = read("glm4_moe", n_shared_experts=3)
    dense, mixed = ({weight.name for weight in list_weights(arch, layer)} for layer in range(2))
    assert "mlp.linear_fc1.weight" in dense
    assert not {name for name in dense if "expert" in name or "router" in name}
    assert {"mlp.router.expert_bias", "mlp.experts.{}.linear_fc1.weight"} <= mixed
    entry = describe("decoder.layers.1.mlp.shared_experts.linear_fc1.weight", arch, False)
    assert entry.shapes == ((3 * 48, 64),) * 2
    assert describe("decoder.layers.1.mlp.router.expert_bias", arch, False).is_constant


def test_a_fused_gate_and_up_projection_is_one_tensor_of_two_parts() -> None:
    entry = describe("decoder.layers.0.mlp.linear_fc1.weight", read("glm4"), False)
    name = "model.layers.0.mlp.gate_up_proj.weight"
    assert entry.parts == [(name, 0, 96, 64), (name, 96, 96, 64)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_of_a_table_is_found_by_its_name_and_names_no_tensor_twice(family: str) -> None:
    arch = read(family)
    entries = list_entries(arch, False)
    assert [describe(entry.name, arch, False) for entry in entries] == entries
    names = [name for entry in entries for name in entry.hf_names]
    assert len(set(names)) == len(names)


def test_experts_of_a_random_model_without_any_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.random.num_experts: found 8, .* it counts with glm4_moe, qwen3_moe"):
        build_random_checkpoint(RandomModelConfig(family="llama", num_experts=8), tmp_path)
