"""Every family against transformers and against one process: values, weights, training, pieces."""

from pathlib import Path
from typing import Any

import pytest
import torch
from check_layouts import LayoutRun, compare_runs, find_problems, run_layouts
from layout_runs import Held, build_spec, evaluate_once, flatten, hold_pieces, launch_each
from safetensors.torch import load_file
from tiny_checkpoints import build_samples, build_sequences, padded_reference_logprobs, write_checkpoint
from tool_loading import load_tool

from megarl.config.schema.roles import Dtype, OptimizerConfig, ParallelConfig
from megarl.mcore.spec import Role, check_layout, read_architecture
from megarl.models.families import FAMILIES
from megarl.sync.plan import TensorSlice

pytestmark = pytest.mark.slow

predict_ranks = load_tool("bench/policy_pieces.py").predict_ranks

LAYOUTS = {
    "tp2": ParallelConfig(num_processes=2, tp=2),
    "tp2_sp": ParallelConfig(num_processes=2, tp=2, sp=True),
    "pp2": ParallelConfig(num_processes=2, pp=2),
    "dp2": ParallelConfig(num_processes=2),
    "ep2": ParallelConfig(num_processes=2, ep=2),
    "tp2_sp_ep2": ParallelConfig(num_processes=2, tp=2, sp=True, ep=2),
}
FOUR = {
    "tp2_pp2": ParallelConfig(num_processes=4, tp=2, sp=True, pp=2),
    "vpp2_dp2": ParallelConfig(num_processes=4, pp=2, vpp=2),
    "tp4": ParallelConfig(num_processes=4, tp=4, sp=True),
    "tp2_cp2": ParallelConfig(num_processes=4, tp=2, cp=2, sp=True),
    "pp2_ep2": ParallelConfig(num_processes=4, pp=2, ep=2),
    "tp2_ep2_etp2": ParallelConfig(num_processes=4, tp=2, sp=True, ep=2, etp=2),
    "tp2_ep4": ParallelConfig(num_processes=4, tp=2, sp=True, ep=4),
    "uneven": ParallelConfig(num_processes=4, pp=2),
}
PIECES = {"deep": ("tp2_pp2", "vpp2_dp2", "tp4", "tp2_cp2"), "qwen3_moe": ("pp2_ep2", "tp2_ep2_etp2", "tp2_ep4")}
"""Layouts of four processes, of which only the pieces are compared"""
UNEVEN = {"num_layers_in_first_pipeline_stage": 1}
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-5, weight_decay=0.1, clip_grad=1e9)
# Four layers on two stages: where the first two are dense, a stage has no expert at all.
DENSE_STAGE = {"num_hidden_layers": 4, "first_k_dense_replace": 2}


def fits(checkpoint: Path, layout: ParallelConfig) -> bool:
    return not check_layout(read_architecture(checkpoint), layout, "layout")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    root = tmp_path_factory.mktemp("families")
    found = {name: (root / name, write_checkpoint(root / name, name)) for name in FAMILIES}
    found["glm4_moe-dense_stage"] = (root / "dense", write_checkpoint(root / "dense", "glm4_moe", **DENSE_STAGE))
    found["deep"] = (root / "deep", write_checkpoint(root / "deep", "qwen2", tied=True, num_hidden_layers=4))
    return found


NAMES = [*FAMILIES, "glm4_moe-dense_stage", "deep"]


@pytest.fixture(scope="module")
def evaluated(models: dict[str, tuple[Path, Any]]) -> dict[str, torch.Tensor]:
    one = {f"{name}-one": build_spec(Role.reference, path) for name, (path, _) in models.items()}
    two = {
        f"{name}-{layout}": build_spec(Role.reference, path, parallel=parallel)
        for name, (path, _) in models.items()
        for layout, parallel in LAYOUTS.items()
        if fits(path, parallel)
    }
    return launch_each(1, evaluate_once, one) | launch_each(2, evaluate_once, two)


@pytest.fixture(scope="module")
def held(models: dict[str, tuple[Path, Any]]) -> dict[str, dict[int, Held]]:
    specs = {
        f"{name}-{layout}": build_spec(Role.reference, path, parallel=parallel)
        for name, (path, _) in models.items()
        for layout, parallel in LAYOUTS.items()
        if fits(path, parallel)
    }
    further = {
        f"{name}-{layout}": build_spec(Role.reference, models[name][0], parallel=FOUR[layout])
        for name, layouts in PIECES.items()
        for layout in layouts
    }
    further["deep-uneven"] = build_spec(Role.reference, models["deep"][0], parallel=FOUR["uneven"], megatron=UNEVEN)
    return launch_each(2, hold_pieces, specs) | launch_each(4, hold_pieces, further)


@pytest.fixture(scope="module")
def runs(models: dict[str, tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, LayoutRun]:
    specs = {}
    for name, (path, _) in models.items():
        for role in (Role.policy, Role.critic):
            specs[f"{name}-{role.value}-one"] = build_spec(role, path, optimizer=OPTIMIZER)
            for layout, parallel in LAYOUTS.items():
                if fits(path, parallel):
                    changes = {"parallel": parallel, "tokens_per_microbatch": 60, "optimizer": OPTIMIZER}
                    specs[f"{name}-{role.value}-{layout}"] = build_spec(role, path, **changes)
    specs["bfloat16"] = build_spec(Role.policy, models["glm4_moe"][0], optimizer=OPTIMIZER, dtype=Dtype.bfloat16)
    return run_layouts(specs, build_samples(), 2, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_are_those_of_transformers_in_every_layout(
    name: str, models: dict[str, tuple[Path, Any]], evaluated: dict[str, torch.Tensor]
) -> None:
    expected = padded_reference_logprobs(models[name][1], build_sequences(seed=5), 0.8)
    found = {key: values for key, values in evaluated.items() if key.rpartition("-")[0] == name}
    assert {f"{name}-{layout}" for layout in ("one", "tp2_sp", "pp2", "dp2")} <= found.keys()
    for key, values in found.items():
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", NAMES)
def test_export_is_bit_equal_from_any_layout(
    name: str, models: dict[str, tuple[Path, Any]], runs: dict[str, LayoutRun]
) -> None:
    source = load_file(models[name][0] / "model.safetensors")
    for key, run in runs.items():
        if key.startswith((f"{name}-policy-", f"{name}-critic-")):
            exported, critic = run.read("before"), "-critic-" in key
            kept = source.keys() - {"lm_head.weight"} if critic else source.keys()
            assert exported.keys() == kept | ({"score.weight"} if critic else set()), key
            assert all(torch.equal(exported[tensor], source[tensor]) for tensor in kept), key


@pytest.mark.parametrize("role", ["policy", "critic"])
@pytest.mark.parametrize("name", NAMES)
def test_every_layout_trains_alike(name: str, role: str, runs: dict[str, LayoutRun]) -> None:
    one = runs[f"{name}-{role}-one"]
    compared = [key for key in runs if key.startswith(f"{name}-{role}-") and key != f"{name}-{role}-one"]
    assert len(compared) >= 3
    for key in compared:
        assert find_problems(compare_runs(runs[key], one)) == [], key


@pytest.mark.parametrize("name", NAMES)
def test_training_moves_every_weight_but_the_constants(name: str, runs: dict[str, LayoutRun]) -> None:
    before, after = (runs[f"{name}-policy-one"].read(when) for when in ("before", "after"))
    for tensor in before:
        assert torch.equal(before[tensor], after[tensor]) is tensor.endswith("e_score_correction_bias"), tensor


def test_the_correction_bias_stays_in_float32_and_as_it_is_in_a_bfloat16_model(
    models: dict[str, tuple[Path, Any]], runs: dict[str, LayoutRun]
) -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = load_file(models["glm4_moe"][0] / "model.safetensors")[name]
    assert not bias.equal(bias.bfloat16().float())
    for directory in ("before", "after"):
        found = runs["bfloat16"].read(directory)
        assert found[name].equal(bias)
        assert found["model.layers.1.mlp.gate.weight"].dtype is torch.bfloat16


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_holds_what_is_predicted_and_that_part_of_the_checkpoint(
    name: str, models: dict[str, tuple[Path, Any]], held: dict[str, dict[int, Held]]
) -> None:
    path = models[name][0]
    wholes, arch = load_file(path / "model.safetensors"), read_architecture(path)
    for key, ranks in held.items():
        found_name, _, layout = key.rpartition("-")
        if found_name != name:
            continue
        predicted = predict_ranks(arch, (LAYOUTS | FOUR)[layout], UNEVEN if layout == "uneven" else {})
        assert ranks.keys() == predicted.keys()
        for rank, pieces in ranks.items():
            assert {piece for piece, _ in pieces} == {flatten(piece) for piece in predicted[rank]}, (key, rank)
            for (*_, whole, region), numbers in pieces:
                assert numbers.equal(TensorSlice(*region).of(wholes[whole])), (key, rank, whole)
