"""LoRA adapters of the policy in every layout: against full gradients, transformers' model and one process."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_runs import LAYOUTS, build_spec, continue_state, find_gradient, launch_each, train_adapters
from safetensors.torch import load_file
from tiny_checkpoints import build_sequences, padded_reference_logprobs, write_checkpoint

from megarl.config.schema.roles import LoraConfig, LoraLayers, ParallelConfig, Recompute
from megarl.mcore.convert import convert, open_source
from megarl.mcore.spec import Role, WorkerSpec

pytestmark = pytest.mark.slow

RANK, ALPHA = 3, 12.0
SCALE = ALPHA / RANK
BOTH = LoraConfig(RANK, ALPHA)
ATTENTION = LoraConfig(RANK, ALPHA, [LoraLayers.attention])
TWO = [name for name in LAYOUTS if name != "one"]
MOE_LAYOUTS = {"ep2": ParallelConfig(num_processes=2, ep=2), "tp2_sp_ep2": ParallelConfig(2, tp=2, sp=True, ep=2)}
GROUPS = [("self_attn", "qkv"), ("mlp", ("gate", "up"))]


def build_specs(root: Path, two: bool) -> dict[str, WorkerSpec]:
    specs = {
        f"dense-{name}": build_spec(Role.policy, root / "dense", name, lora=BOTH)
        for name in LAYOUTS
        if (name != "one") == two
    }
    moe = MOE_LAYOUTS if two else {"one": ParallelConfig()}
    for name, parallel in moe.items():
        specs[f"moe-{name}"] = build_spec(Role.policy, root / "moe", parallel=parallel, lora=ATTENTION)
    if not two:
        specs["dense-recompute"] = build_spec(Role.policy, root / "dense", lora=BOTH, recompute=Recompute.full)
    return specs


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as scratch:
        write_checkpoint(Path(scratch) / "dense", "qwen2", tied=True, num_hidden_layers=4)
        write_checkpoint(Path(scratch) / "moe", "qwen3_moe")
        yield Path(scratch)


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = launch_each(1, train_adapters, build_specs(root, two=False), scratch=str(root))
    return found | launch_each(2, train_adapters, build_specs(root, two=True), scratch=str(root))


def test_before_the_first_step_the_policy_is_its_checkpoint(root: Path, runs: dict[str, Any]) -> None:
    for name, run in runs.items():
        start = load_file(root / name.partition("-")[0] / "model.safetensors")
        before = run["before"]["weights"]
        assert before.keys() == start.keys()
        assert all(torch.equal(before[key], start[key]) for key in start), name


@pytest.mark.parametrize("name", ["dense-one", "dense-tp2_sp", "moe-one"])
def test_training_beside_the_weights_is_the_exported_merged_model(name: str, root: Path, runs: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(root / name / "after").eval()
    sequences = build_sequences(seed=5)
    vocabulary = merged.config.vocab_size
    sequences.tokens.remainder_(vocabulary)
    expected = padded_reference_logprobs(merged, sequences, 0.8)
    torch.testing.assert_close(runs[name]["after"]["evaluation"], expected, rtol=0, atol=1e-5)
    assert (runs[name]["after"]["evaluation"] - runs[name]["before"]["evaluation"]).abs().max() > 1e-3


def test_all_but_the_adapted_weights_stay_as_they_are(runs: dict[str, Any]) -> None:
    for name, run in runs.items():
        before, after = run["before"]["weights"], run["after"]["weights"]
        moved = {key for key in before if not torch.equal(before[key], after[key])}
        kinds = ("q_proj", "k_proj", "v_proj", "o_proj") + (() if "moe" in name else ("gate", "up_proj", "down_proj"))
        assert moved == {key for key in before if key.endswith(".weight") and any(kind in key for kind in kinds)}, name


def test_peft_s_file_gives_the_merged_weights(root: Path, runs: dict[str, Any]) -> None:
    for name, run in runs.items():
        config = json.loads((root / name / "after" / "adapter" / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"], config["peft_type"]) == (RANK, ALPHA, "LORA")
        own = {key: tensor for key, tensor in run["adapter"].items() if ".lora_A." in key}
        assert {key.split(".")[-3] for key in own} == set(config["target_modules"])
        for key, a in own.items():
            b, weight = run["adapter"][key.replace("lora_A", "lora_B")], key.split(".", 2)[2].replace("lora_A.", "")
            merged = run["before"]["weights"][weight] + SCALE * b @ a
            torch.testing.assert_close(run["after"]["weights"][weight], merged, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["dense-one", "dense-tp2", "dense-tp2_sp", "dense-pp2", "dense-cp2"])
def test_the_adapters_gradient_follows_from_the_gradient_of_the_whole_weights(
    name: str, root: Path, runs: dict[str, Any]
) -> None:
    # Of W + s B A with the gradient G of W: dB = s G A', dA = s B' G, summed over the weights that share an A.
    full = launch_each(1, find_gradient, {"full": build_spec(Role.policy, root / name / "after")})["full"]
    adapter, found = runs[name]["adapter"], runs[name]["gradient"]
    for layer in range(4):
        for room, parts in (*GROUPS, ("self_attn", "o"), ("mlp", ("down",))):
            keys = [f"model.layers.{layer}.{room}.{part}_proj" for part in parts]
            a = adapter[f"base_model.model.{keys[0]}.lora_A.weight"]
            b = {key: adapter[f"base_model.model.{key}.lora_B.weight"] for key in keys}
            da = SCALE * sum(b[key].T @ full[f"{key}.weight"] for key in keys)
            for key in keys:
                expected = SCALE * (SCALE * full[f"{key}.weight"] @ a.T @ a + b[key] @ da)
                torch.testing.assert_close(found[f"{key}.weight"], expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", [f"dense-{name}" for name in (*TWO, "recompute")] + [f"moe-{x}" for x in MOE_LAYOUTS])
def test_every_layout_trains_the_same_adapters(name: str, runs: dict[str, Any]) -> None:
    one, run = runs[f"{name.partition('-')[0]}-one"], runs[name]
    for key, tensor in one["adapter"].items():
        torch.testing.assert_close(run["adapter"][key], tensor, rtol=1e-4, atol=2e-5)
    for own, expected in zip(run["metrics"], one["metrics"], strict=True):
        assert own["policy/grad_norm"] == pytest.approx(expected["policy/grad_norm"], rel=1e-4)
        assert own["policy/loss"] == pytest.approx(expected["policy/loss"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["dense-tp2_sp", "moe-ep2"])
def test_a_saved_state_goes_on_in_any_layout(name: str, root: Path, runs: dict[str, Any]) -> None:
    kind, saved = name.partition("-")[0], runs[name]
    specs = {key: spec for key, spec in build_specs(root, two=True).items() if key.startswith(kind)}
    found = launch_each(2, continue_state, specs, str(root / name))
    for key, own in found.items():
        for tensor, expected in saved["after"]["weights"].items():
            torch.testing.assert_close(own["loaded"]["weights"][tensor], expected, rtol=0, atol=1e-7)
        assert own["metrics"]["policy/grad_norm"] == pytest.approx(saved["metrics"][-1]["policy/grad_norm"], rel=1e-4)
        if key == name:
            assert own["checksum"] == saved["checksum"]


@pytest.mark.parametrize("name", ["dense-vpp2", "moe-tp2_sp_ep2"])
def test_a_saved_state_is_converted_to_what_the_ranks_export(name: str, root: Path, runs: dict[str, Any]) -> None:
    convert(open_source(root / name / "state"), root / f"{name}-hf")
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        found, expected = (load_file(path / file) for path in (root / f"{name}-hf", root / name / "after"))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected), file
