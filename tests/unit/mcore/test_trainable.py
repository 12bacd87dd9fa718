"""critic.trainable=mlp and policy.lora: which weights those are, in both kinds of layers and every family."""

import pytest
from tiny_checkpoints import build_spec

from megarl.config.schema.roles import (
    Fp8,
    LoraConfig,
    LoraLayers,
    OptimizerConfig,
    ParallelConfig,
    RandomModelConfig,
    Trainable,
)
from megarl.mcore.entries import list_entries
from megarl.mcore.model import is_mlp
from megarl.mcore.spec import Role, check_role_fields
from megarl.models.families import FAMILIES
from megarl.plan.job import describe_random


@pytest.mark.parametrize(
    ("is_trained", "names"),
    [
        (True, ("mlp.linear_fc1.weight", "mlp.linear_fc2.bias", "mlp.shared_experts.linear_fc2.weight")),
        (True, ("mlp.experts.local_experts.7.linear_fc1.weight", "mlp.experts.linear_fc2.weight12")),
        (
            False,
            ("mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc2.post_layernorm.weight", "pre_mlp_layernorm.weight"),
        ),
        (False, ("mlp.router.weight", "mlp.router.expert_bias", "mlp.shared_experts.gate_weight")),
        (False, ("self_attention.linear_qkv.weight", "self_attention.linear_proj.weight", "input_layernorm.weight")),
    ],
)
def test_mlps_and_experts_are_trained_and_norms_routers_gates_and_attention_are_frozen(
    is_trained: bool, names: tuple[str, ...]
) -> None:
    assert {is_mlp(f"decoder.layers.3.{name}") for name in names} == {is_trained}


@pytest.mark.parametrize("family", FAMILIES)
def test_in_every_family_they_are_the_gate_up_and_down_projections(family: str) -> None:
    entries = list_entries(describe_random(RandomModelConfig(family=family, num_layers=4)), True)
    trained = {name.split(".", 3)[3] for entry in entries if is_mlp(entry.name) for name in entry.hf_names}
    frozen = {name for entry in entries if not is_mlp(entry.name) for name in entry.hf_names}
    assert trained
    assert all("mlp" in name and name.endswith("proj.weight") for name in trained), trained
    assert not [name for name in frozen if "mlp" in name and name.endswith("proj.weight")]


@pytest.mark.parametrize(
    ("family", "pp", "refused"), [("qwen3_moe", 2, True), ("qwen3_moe", 1, False), ("qwen3", 2, False)]
)
def test_stages_that_would_train_experts_alone_are_refused(family: str, pp: int, refused: bool) -> None:
    arch = describe_random(RandomModelConfig(family=family, num_layers=4))
    parallel = ParallelConfig(num_processes=pp, pp=pp)
    spec = build_spec(role=Role.critic, parallel=parallel, optimizer=OptimizerConfig(), trainable=Trainable.mlp)
    assert bool(list(check_role_fields(arch, spec))) is refused


@pytest.mark.parametrize(
    ("family", "lora", "fp8", "messages"),
    [
        ("qwen3", LoraConfig(rank=4), None, []),
        ("qwen3", LoraConfig(rank=4, layers=[]), None, ["policy.lora.layers: found nothing"]),
        ("qwen3_moe", LoraConfig(rank=4), None, ["policy.lora.layers: found mlp; experts have no adapters"]),
        ("qwen3_moe", LoraConfig(rank=4, layers=[LoraLayers.attention]), None, []),
        ("glm4", LoraConfig(rank=4), None, ["policy.lora.rank: found 4; a model with norms of its layers' outputs"]),
        ("qwen3", LoraConfig(rank=4), Fp8.hybrid, ["policy.fp8: found hybrid with policy.lora.rank=4", "policy.fp8"]),
    ],
)
def test_adapters_are_refused_by_name_where_they_cannot_be_trained(
    family: str, lora: LoraConfig, fp8: Fp8 | None, messages: list[str]
) -> None:
    arch = describe_random(RandomModelConfig(family=family, num_layers=4))
    spec = build_spec(role=Role.policy, optimizer=OptimizerConfig(), lora=lora, fp8=fp8)
    found = list(check_role_fields(arch, spec))
    assert [text.startswith(message) for text, message in zip(found, messages, strict=True)] == [True] * len(messages)
