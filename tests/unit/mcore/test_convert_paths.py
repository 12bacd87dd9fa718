"""Conversion writes and reads only where it was told to: not over its source, not outside a checkpoint's directory."""

import json
from pathlib import Path

import pytest
from tiny_checkpoints import write_checkpoint

from megarl.checkpoint.manifest import CheckpointError
from megarl.mcore.weights.convert import hf_to_megatron
from megarl.mcore.weights.source import HfSource, open_source

QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "hf", "llama")
    return tmp_path / "hf"


@pytest.mark.parametrize("place", ["hf", "hf/megatron", "."])
def test_a_target_that_is_in_or_around_its_source_is_refused_and_the_source_stays(
    hf: Path, tmp_path: Path, place: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    with HfSource(hf) as opened, pytest.raises(ValueError, match="the target must be apart from the source"):
        hf_to_megatron(opened, tmp_path / place, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("file", ["../hf/model.safetensors", "/etc/passwd", "..", 3])
def test_an_index_that_leads_out_of_its_directory_is_refused_by_tensor_and_file(hf: Path, file: str | int) -> None:
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {QUERY: file}}))
    with pytest.raises(CheckpointError, match=f"{QUERY} is in {file!r}; a file of this directory was expected"):
        open_source(hf)
