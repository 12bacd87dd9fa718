"""A critic is written as what transformers calls a sequence classifier with one label."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import write_checkpoint

from megarl.mcore.weights.hf_files import write_hf_checkpoint


@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("qwen3", False), ("llama", True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_a_critic_with_every_weight_in_its_place(
    tmp_path: Path, family: str, tied: bool, dtype: torch.dtype
) -> None:
    from transformers import AutoModelForSequenceClassification

    write_checkpoint(tmp_path / "policy", family, tied=tied)
    tensors = {name: t.to(dtype) for name, t in load_file(tmp_path / "policy" / "model.safetensors").items()}
    tensors.pop("lm_head.weight", None)
    tensors["score.weight"] = torch.randn(1, 64).to(dtype)
    write_hf_checkpoint(tmp_path / "critic", tmp_path / "policy", tensors.items())
    model, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "critic", dtype="auto", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    found = model.state_dict()
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) and found[name].dtype == dtype for name in tensors)
    config = json.loads((tmp_path / "critic" / "config.json").read_text())
    assert config["num_labels"] == 1
    assert config["architectures"] == [type(model).__name__]


def test_a_policy_keeps_its_config(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "policy")
    tensors = load_file(tmp_path / "policy" / "model.safetensors")
    write_hf_checkpoint(tmp_path / "copy", tmp_path / "policy", tensors.items())
    assert (tmp_path / "copy" / "config.json").read_bytes() == (tmp_path / "policy" / "config.json").read_bytes()
