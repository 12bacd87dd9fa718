"""What of a model, a layout, the role's keys and model.megatron is refused, by the name of the key, and what
Megatron is told of the rest.
"""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import build_fields, build_spec

from megarl.config.schema.roles import (
    Dtype,
    Fp8,
    Fp8Recipe,
    LoraConfig,
    LoraLayers,
    OptimizerConfig,
    ParallelConfig,
    RandomModelConfig,
    Recompute,
    RecomputeMethod,
    Trainable,
)
from megarl.mcore.checkpoints import describe, list_entries, padded_vocab_size, to_hf, to_megatron
from megarl.mcore.model import build_config, check_options, is_mlp
from megarl.mcore.spec import (
    ROLE_KEYS,
    Role,
    build_role_fields,
    check_engine,
    check_role_fields,
    has_transformer_engine,
    read_architecture,
)
from megarl.models.architecture import Architecture
from megarl.models.families import FAMILIES, parse_architecture
from megarl.plan.job import describe_random

CONFIG: dict[str, Any] = {
    **{"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 48, "intermediate_size": 96},
    **{"num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 100, "tie_word_embeddings": True},
}
MOE = {"num_experts": 8, "num_key_value_heads": 4, "intermediate_size": 160, "vocab_size": 100}


def read(**changes: Any) -> Architecture:
    """The model of CONFIG, or with experts=True one of experts."""
    content = {"model_type": "qwen3_moe", **build_fields("qwen3_moe"), **MOE} if changes.pop("experts", 0) else CONFIG
    return parse_architecture({**content, **changes}, Path("config.json"))


def layout(**sizes: int) -> ParallelConfig:
    """Of as many processes as it asks for."""
    number = max(sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1), sizes.get("ep", 1) * sizes.get("etp", 1))
    return ParallelConfig(num_processes=number, **sizes)


@pytest.mark.parametrize(
    ("experts", "megatron", "parallel", "message"),
    [
        (0, {"attention_dropot": 0.1}, {}, "did you mean attention_dropout"),
        (0, {"num_layers": 3}, {}, "num_layers: found 3; the checkpoint, the layout or the dtype"),
        (0, {"fp8": "hybrid"}, {}, "megatron.fp8: found 'hybrid'; set policy.fp8 and critic.fp8 instead"),
        (0, {"fp8_param": True}, {}, "megatron.fp8_param: found True; weights are kept in the role's"),
        (0, {"fp4_param": True}, {}, "megatron.fp4_param: found True; weights are kept in the role's"),
        (0, {"deterministic_mode": True}, {}, "deterministic_mode: found True; set train.deterministic instead"),
        (0, {"moe_aux_loss_coeff": 0.1}, {}, r"moe_aux_loss_coeff: found 0\.1, but the model has no experts"),
        (0, {}, {"tp": 2}, "tp: found 2, .* the model's 3 key-value heads; the nearest is 1"),
        (0, {}, {"tp": 4}, "tp: found 4, .* the model's 6 attention heads; the nearest is 3"),
        (0, {}, {"pp": 3}, "parallel.pp: found 3, .* the model's 4 layers; the nearest is 2"),
        (0, {}, {"pp": 2, "vpp": 3}, "vpp: found 3, .* 2 layers of a stage; the nearest is 2"),
        (0, {}, {"sp": True}, "parallel.sp: found true with tp 1"),
        (0, {}, {"ep": 2}, "parallel.ep: found 2, but the model has no experts; it must be 1"),
        (1, {}, {"ep": 3}, r"parallel\.ep: found 3, which does not divide the model's 8 experts"),
        (1, {}, {"etp": 5}, r"parallel\.etp: found 5, which does not divide"),
        (1, {}, {"tp": 2}, r"parallel\.sp: found false with tp 2; a model of experts needs true"),
        (1, {"moe_aux_loss_coeff": -0.1}, {}, r"found -0\.1; it must be a number of 0 or more"),
        (1, {"moe_z_loss_coeff": [0.1]}, {}, "moe_z_loss_coeff: found"),
        (1, {"moe_router_load_balancing_type": "aux_loss"}, {}, "balancing_type: found 'aux_loss'; the checkpoint"),
        (1, {"moe_token_dispatcher_type": "allgather"}, {}, "found 'allgather'; it must be alltoall or flex"),
        (1, {"recompute_modules": ["core_attn", "moe"]}, {}, "recompute_modules: found moe"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_key(
    experts: int, megatron: dict[str, Any], parallel: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_config(read(experts=experts), layout(**parallel), Dtype.float32, megatron)


def test_a_directory_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config.json: not found"):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("megatron", "parallel"),
    [
        ({}, {"tp": 6}),
        ({}, {"pp": 2, "vpp": 2}),
        ({"num_layers_in_last_pipeline_stage": 2}, {"pp": 3}),
        ({"recompute_modules": ["mlp"]}, {}),
    ],
)
def test_layouts_and_options_that_fit_reach_the_transformer_config(
    megatron: dict[str, Any], parallel: dict[str, int]
) -> None:
    config = build_config(read(), layout(**parallel), Dtype.bfloat16, megatron)
    assert config.tensor_model_parallel_size == parallel.get("tp", 1)
    assert (config.params_dtype, config.num_query_groups) == (torch.bfloat16, 3)
    assert all(getattr(config, field) == value for field, value in megatron.items())
    # Two stages of an interleaved pipeline would otherwise mix up what they send each other.
    assert config.overlap_p2p_comm == ("vpp" in parallel) == (not config.batch_p2p_comm)


def test_what_megatron_itself_refuses_is_found_before_anything_starts() -> None:
    """Megatron-Core 0.16.1 raises ImportError for permute fusion where Transformer Engine is missing."""
    from megatron.core.transformer.moe import moe_utils

    refused: list[dict[str, Any]] = [{"cpu_offloading": True, "cpu_offloading_num_layers": 99}]
    if getattr(moe_utils, "fused_permute", None) is None:
        refused.append({"moe_permute_fusion": True})
    for options in refused:
        (problem,) = check_options(read(), build_spec(megatron=options))
        assert problem.startswith("model.megatron: refused by Megatron with this layout")
    assert check_options(read(), build_spec()) == []


def test_the_padded_vocabulary_is_the_same_for_layouts_that_are_powers_of_two() -> None:
    assert {padded_vocab_size(100, tp) for tp in (1, 2, 4, 8)} == {128}
    assert padded_vocab_size(100, 3) % 3 == 0


@pytest.mark.parametrize("etp", [1, 2, 4])
@pytest.mark.parametrize(("weight", "shape"), [("linear_fc1.weight", (48, 64)), ("linear_fc2.weight", (64, 48))])
def test_an_experts_weights_come_back_from_their_shards(weight: str, shape: tuple[int, int], etp: int) -> None:
    arch = read(experts=1)
    entry = describe(f"decoder.layers.1.mlp.experts.5.{weight}", arch, with_value_head=False)
    assert all(name.startswith("model.layers.1.mlp.experts.5.") for name in entry.hf_names)
    assert entry.expert == 5
    whole = [torch.randn(shape) for _ in entry.hf_names]
    shards = [to_megatron(entry, whole, arch, etp, rank) for rank in range(etp)]
    assert len({shard.shape for shard in shards}) == 1
    found = to_hf(entry, shards, arch)
    assert [name for name, _ in found] == list(entry.hf_names)
    assert all(torch.equal(tensor, expected) for (_, tensor), expected in zip(found, whole, strict=True))


# The keys of a role: recomputation, FP8, what is trained


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3}
TENSORWISE = {"fp8": Fp8.e4m3, "fp8_recipe": Fp8Recipe.tensorwise}


@pytest.mark.parametrize(
    ("keys", "gpu", "expected"),
    [
        ({"recompute": Recompute.full, **TENSORWISE}, False, {**FULL, "fp8": "e4m3", "fp8_recipe": "tensorwise"}),
        ({"recompute": Recompute.selective}, False, {"recompute_granularity": "selective"}),
        ({"recompute": Recompute.none}, True, {}),
        ({"recompute": Recompute.none, "deterministic": True}, True, {"deterministic_mode": True}),
        ({"recompute": Recompute.none, "deterministic": True}, False, {}),
    ],
)
def test_the_keys_become_fields_of_megatron(
    keys: dict[str, Any], gpu: bool, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert set(ROLE_KEYS) <= {field.name for field in dataclasses.fields(TransformerConfig)}
    fields = build_role_fields(build_spec(recompute_num_layers=3, **keys))
    found = {key: value for key, value in fields.items() if value not in (None, False)}
    assert found == {"fp8_recipe": fields["fp8_recipe"], **expected}


ARCHS = {family: describe_random(RandomModelConfig(family=family, num_layers=6)) for family in FAMILIES}
LORA, OF_ATTENTION = LoraConfig(rank=4), LoraConfig(rank=4, layers=[LoraLayers.attention])
BLOCK = RecomputeMethod.block


def recomputes(number: int, method: RecomputeMethod = RecomputeMethod.uniform) -> dict[str, Any]:
    return {"recompute": Recompute.full, "recompute_num_layers": number, "recompute_method": method}


@pytest.mark.parametrize(
    ("family", "role", "fields", "parallel", "messages"),
    [
        ("qwen3", "reference", recomputes(4), {}, ["found 4, which does not divide the 6 layers; 3 does"]),
        ("qwen3", "reference", recomputes(8), {}, ["found 8, which does not divide the 6 layers; 6 does"]),
        ("qwen3", "reference", recomputes(2), {"pp": 2}, ["3 layers of each of the 2 pipeline stages; 1 does"]),
        ("qwen3", "reference", recomputes(7, BLOCK), {}, ["recompute_num_layers: found 7; there are 6 layers"]),
        ("qwen3", "reference", recomputes(3), {"pp": 2}, []),
        ("qwen3", "reference", recomputes(1), {"pp": 3, "vpp": 2}, []),
        ("qwen3", "reference", recomputes(5, BLOCK), {}, []),
        # Stages that would train experts alone.
        ("qwen3_moe", "critic", {"trainable": Trainable.mlp}, {"pp": 2}, ["critic.parallel.pp: found 2 with"]),
        ("qwen3_moe", "critic", {"trainable": Trainable.mlp}, {}, []),
        ("qwen3", "critic", {"trainable": Trainable.mlp}, {"pp": 2}, []),
        ("qwen3", "policy", {"lora": LORA}, {}, []),
        ("qwen3", "policy", {"lora": LoraConfig(rank=4, layers=[])}, {}, ["policy.lora.layers: found nothing"]),
        ("qwen3_moe", "critic", {"lora": LORA}, {}, ["found mlp; experts have no adapters: critic.lora.layers="]),
        ("qwen3_moe", "critic", {"lora": OF_ATTENTION, "trainable": Trainable.mlp}, {"pp": 2}, []),
        ("qwen3_moe", "policy", {"lora": LORA}, {}, ["policy.lora.layers: found mlp; experts have no adapters"]),
        ("qwen3_moe", "policy", {"lora": OF_ATTENTION}, {}, []),
        ("glm4", "policy", {"lora": LORA}, {}, ["policy.lora.rank: found 4; a model with norms of its layers'"]),
        ("qwen3", "policy", {"lora": LORA, "fp8": Fp8.hybrid}, {}, ["found hybrid with policy.lora.rank=4", "fp8"]),
    ],
)
def test_keys_of_a_role_that_do_not_fit_the_model_are_refused(
    family: str, role: str, fields: dict[str, Any], parallel: dict[str, int], messages: list[str]
) -> None:
    optimizer = None if role == "reference" else OptimizerConfig()
    spec = build_spec(role=Role(role), optimizer=optimizer, parallel=layout(**parallel), **fields)
    problems = list(check_role_fields(ARCHS[family], spec))
    assert all(message in problem for problem, message in zip(problems, messages, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_trained_of_mlps_are_their_projections_and_those_of_experts(family: str) -> None:
    entries = list_entries(ARCHS[family], True)
    trained = {name.split(".", 3)[3] for entry in entries if is_mlp(entry.name) for name in entry.hf_names}
    frozen = {name for entry in entries if not is_mlp(entry.name) for name in entry.hf_names}
    assert trained
    # Of gpt-oss parts of down_proj and down_proj_bias, #0/4,0/1.
    is_projection = re.compile(r"mlp\..*_proj(\.weight|(_bias)?#\d.*)$").search
    assert all(map(is_projection, trained)), trained
    assert not list(filter(is_projection, frozen))


@pytest.mark.parametrize(
    ("is_trained", "names"),
    [
        # The names of local and of grouped experts, and what stands beside the projections.
        (True, ("experts.local_experts.7.linear_fc1.weight", "experts.linear_fc2.weight12", "linear_fc2.bias")),
        (False, ("linear_fc1.layer_norm_weight", "linear_fc2.post_layernorm.weight", "router.expert_bias")),
        (False, ("router.weight", "shared_experts.gate_weight")),
    ],
)
def test_norms_routers_and_gates_of_mlps_are_frozen(is_trained: bool, names: tuple[str, ...]) -> None:
    assert {is_mlp(f"decoder.layers.3.mlp.{name}") for name in names} == {is_trained}


H100, B200, ADA, A100 = (9, 0), (10, 0), (8, 9), (8, 0)
FP8 = "reference.fp8: found hybrid; it needs"


@pytest.mark.parametrize(
    ("recipe", "with_te", "capability", "message"),
    [
        ("tensorwise", False, H100, f"{FP8} Transformer Engine, which is not installed"),
        ("tensorwise", True, None, f"{FP8} a GPU and there is none here"),
        ("tensorwise", True, A100, "8.9 or more, and this one has 8.0; null computes without it"),
        ("blockwise", True, ADA, "reference.fp8_recipe may be tensorwise here"),
        ("mxfp8", True, H100, "has 9.0; reference.fp8_recipe may be tensorwise or blockwise here"),
        ("tensorwise", True, ADA, None),
        ("blockwise", True, H100, None),
        ("mxfp8", True, B200, None),
    ],
)
def test_what_transformer_engine_cannot_compute_here_is_refused(
    recipe: str, with_te: bool, capability: tuple[int, int] | None, message: str | None
) -> None:
    spec = build_spec(dtype=Dtype.bfloat16, fp8=Fp8.hybrid, fp8_recipe=Fp8Recipe(recipe))
    problems = list(check_engine(spec, with_te, capability, in_worker=True))
    assert len(problems) == (message is not None)
    assert message is None or message in problems[0]


def run_python(code: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{Path(__file__).resolve().parents[3]}"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_broken_transformer_engine_is_an_error_and_not_its_absence(tmp_path: Path) -> None:
    """With its extension for torch missing it is found as ever, and importing it raises FileNotFoundError."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise FileNotFoundError('no shared object file')")
    code = """
import torch
torch.cuda.is_available = lambda: True
from megarl.mcore.spec import has_transformer_engine
try:
    has_transformer_engine()
except RuntimeError as error:
    print(error)
"""
    broken = "Transformer Engine is installed and broken (FileNotFoundError: no shared object file); make clean install"
    assert run_python(code, tmp_path).startswith(broken)


COUNT = """
import dataclasses, json, sys
import torch
with_te = {with_te}
if with_te and not torch.cuda.is_available():
    # What Megatron asks of a GPU while it builds a model. FlashMLA is linked against a driver; Megatron can do without.
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.Stream = lambda *args, **kwargs: None
    sys.modules["flash_mla"] = None
from megarl.config.schema.roles import Dtype, ParallelConfig, RandomModelConfig
from megarl.mcore import layers
from megarl.mcore.model import count_stages
from megarl.models.families import FAMILIES
from megarl.plan.job import describe_random
if not with_te:
    layers.has_transformer_engine = lambda: False
assert layers.find_layers().name.startswith("Transformer Engine") is with_te
for family in FAMILIES:
    arch = describe_random(RandomModelConfig(family=family, num_layers=4))
    stages = count_stages(arch, ParallelConfig(num_processes=2, pp=2), Dtype.bfloat16, {{}}, family == "llama")
    print(json.dumps([family, *map(dataclasses.asdict, stages)]))
"""


@pytest.mark.skipif(
    not has_transformer_engine(), reason="Transformer Engine is not installed; CONTRIBUTING says how it is tested"
)
def test_transformer_engines_layers_have_the_parameters_of_the_local_ones_in_every_family(tmp_path: Path) -> None:
    found, expected = (run_python(COUNT.format(with_te=with_te), tmp_path) for with_te in (True, False))
    assert found == expected
