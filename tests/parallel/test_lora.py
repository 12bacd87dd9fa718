"""LoRA adapters against full gradients, transformers' model and PEFT's file; layouts: test_layouts.py."""

import json
from pathlib import Path

import pytest
import torch
from layout_runs import Run, build_spec, run_layouts, run_specs
from safetensors.torch import load_file
from tiny_checkpoints import build_samples, padded_reference_logprobs, padded_reference_values, write_checkpoint

from megarl.config.schema.roles import LoraConfig, LoraLayers
from megarl.mcore.spec import Role

pytestmark = pytest.mark.slow

RANK, ALPHA = 3, 12.0
SCALE = ALPHA / RANK
BOTH, ATTENTION = LoraConfig(RANK, ALPHA), LoraConfig(RANK, ALPHA, [LoraLayers.attention])
ROWS = {
    **{f"dense-{layout}": BOTH for layout in ("one", "tp2", "tp2-sp", "pp2", "cp2")},
    **{f"moe-{layout}": ATTENTION for layout in ("one", "dp2-ep2")},
    **{f"critic-{layout}": BOTH for layout in ("one", "tp2-sp", "pp2")},
}
GROUPS = [("self_attn", "qkv"), ("mlp", ("gate", "up")), ("self_attn", "o"), ("mlp", ("down",))]
"""Projections that share an A"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    root = tmp_path_factory.mktemp("lora")
    for name in ("dense", "critic"):
        write_checkpoint(root / name, "qwen2", tied=True, num_hidden_layers=4)
    write_checkpoint(root / "moe", "qwen3_moe")
    specs = {}
    for name, lora in ROWS.items():
        kind, _, layout = name.partition("-")
        specs[name] = build_spec(Role.critic if kind == "critic" else Role.policy, root / kind, layout, lora=lora)
    verbs = "evaluate weights:before update:2 evaluate weights:after gradient:gradient"
    return run_layouts(root / "runs", specs, build_samples(), verbs)


def read_adapter(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.directory / "after" / "adapter" / "adapter_model.safetensors")


@pytest.mark.parametrize("name", ["dense-one", "dense-tp2-sp", "moe-one", "critic-tp2-sp"])
def test_training_beside_the_weights_is_the_exported_merged_model(name: str, runs: dict[str, Run]) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    sequences, directory = build_samples().sequences, runs[name].directory / "after"
    if runs[name].spec.role is Role.critic:
        expected = padded_reference_values(AutoModelForSequenceClassification.from_pretrained(directory), sequences)
    else:
        expected = padded_reference_logprobs(AutoModelForCausalLM.from_pretrained(directory), sequences, 0.8)
    before, after = runs[name]["evaluate"]
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-5)
    assert (after - before).abs().max() > 1e-3


@pytest.mark.parametrize("name", ROWS)
def test_peft_s_file_gives_the_merged_weights(name: str, runs: dict[str, Run]) -> None:
    run, adapter = runs[name], read_adapter(runs[name])
    config = json.loads((run.directory / "after" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (RANK, ALPHA, "LORA")
    own = {key: tensor for key, tensor in adapter.items() if ".lora_A." in key}
    assert {key.split(".")[-3] for key in own} == set(config["target_modules"])
    before, after = run.read("before"), run.read("after")
    is_critic = run.spec.role is Role.critic
    assert config["task_type"] == ("SEQ_CLS" if is_critic else "CAUSAL_LM")
    heads = {f"base_model.model.{name}.weight": after[f"{name}.weight"] for name in config.get("modules_to_save", ())}
    assert len(adapter) == 2 * len(own) + len(heads) == 2 * len(own) + is_critic
    assert all(torch.equal(adapter[key], head) for key, head in heads.items())
    for key, a in own.items():
        b, weight = adapter[key.replace("lora_A", "lora_B")], key.split(".", 2)[2].replace("lora_A.", "")
        torch.testing.assert_close(after[weight], before[weight] + SCALE * b @ a, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in ROWS if not name.startswith("moe")])
def test_the_adapters_gradient_follows_from_the_gradient_of_the_whole_weights(
    name: str, runs: dict[str, Run], tmp_path: Path
) -> None:
    # Of W + s B A with the gradient G of W: dB = s G A', dA = s B' G, summed over the weights that share an A.
    spec = build_spec(runs[name].spec.role, runs[name].directory / "after")
    full = run_specs(tmp_path, {"full": spec}, "gradient:gradient")["full"].read("gradient")
    adapter, found = read_adapter(runs[name]), runs[name].read("gradient")
    if "score.weight" in full:
        torch.testing.assert_close(found["score.weight"], full["score.weight"], rtol=1e-4, atol=2e-6)
    for layer in range(4):
        for room, parts in GROUPS:
            keys = [f"model.layers.{layer}.{room}.{part}_proj" for part in parts]
            a = adapter[f"base_model.model.{keys[0]}.lora_A.weight"]
            b = {key: adapter[f"base_model.model.{key}.lora_B.weight"] for key in keys}
            da = SCALE * sum(b[key].T @ full[f"{key}.weight"] for key in keys)
            for key in keys:
                expected = SCALE * (SCALE * full[f"{key}.weight"] @ a.T @ a + b[key] @ da)
                torch.testing.assert_close(found[f"{key}.weight"], expected, rtol=1e-4, atol=2e-6)
