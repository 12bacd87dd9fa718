"""model.path: files that do not hold the model of config.json are named before any process is started."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.run.inputs import load_models

KEY = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the checkpoint of model=tiny."""
    shutil.copytree(load_models(load_config(["model=tiny"])).checkpoint, tmp_path / "model")
    return tmp_path / "model"


def load(model: Path) -> None:
    load_models(load_config(["model=checkpoint", f"model.path={model}"]))


def change(model: Path, edit) -> None:
    tensors = load_file(model / "model.safetensors")
    edit(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop(KEY), f"missing: {KEY}"),
        (lambda tensors: tensors.update({KEY: tensors[KEY][:3].clone()}), f"misshaped: {KEY} is .3, 192., config.json"),
        (lambda tensors: tensors.update({KEY: tensors[KEY].int()}), "has tensors of I32; float weights are expected"),
    ],
)
def test_tensors_that_config_json_does_not_ask_for_are_named(model: Path, edit, message: str):
    change(model, edit)
    with pytest.raises(ConfigError, match=f"model.path: {model}: {message}"):
        load(model)


def test_a_truncated_file_is_named(model: Path):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=f"model.path: {file}: "):
        load(model)


def test_further_tensors_are_left_alone(model: Path):
    change(model, lambda tensors: tensors.update({"visual.weight": tensors[KEY].clone()}))
    load(model)
