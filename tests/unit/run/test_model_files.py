"""model.path: files that do not hold the model of config.json are named before any process is started."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.run.evaluation import load_evaluation_inputs
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


def split(model: Path) -> tuple[dict[str, str], list[str]]:
    """Write the tensors into two files; returns the index and its names, without writing it."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    index = {name: "one.safetensors" if place % 2 else "two.safetensors" for place, name in enumerate(names)}
    for file in set(index.values()):
        save_file({name: tensors[name] for name in names if index[name] == file}, model / file)
    return index, names


def write_index(model: Path, index: dict[str, str]) -> None:
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": index})
    )


def test_two_files_with_an_index_are_loaded_and_a_third_that_it_does_not_name_is_left_alone(model: Path):
    index, _ = split(model)
    write_index(model, index)
    shutil.copy(model / "one.safetensors", model / "older.safetensors")
    load(model)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda index, names, model: index.update({names[0]: index[names[1]]}),
            "model.embed_tokens.weight is in two.safetensors, by the index in one.safetensors",
        ),
        (
            lambda index, names, model: index.pop(names[0]),
            "model.embed_tokens.weight is in two.safetensors, by the index in none",
        ),
        (
            lambda index, names, model: (model / "one.safetensors").unlink(),
            "lacks one.safetensors, of 2 files that model.safetensors.index.json names",
        ),
        (
            lambda index, names, model: save_file(
                load_file(model / "one.safetensors") | load_file(model / "two.safetensors"), model / "one.safetensors"
            ),
            "model.embed_tokens.weight is in one.safetensors and two.safetensors, by the index in two.safetensors",
        ),
        (
            lambda index, names, model: shutil.copy(model / "one.safetensors", model / "model.safetensors"),
            "has model.safetensors and model.safetensors.index.json, which names other files",
        ),
    ],
)
def test_files_that_differ_from_the_index_are_named_with_what_differs(model: Path, edit, message: str):
    index, names = split(model)
    assert names[0] in ("lm_head.weight", "model.embed_tokens.weight")
    edit(index, names, model)
    write_index(model, index)
    with pytest.raises(ConfigError) as caught:
        load(model)
    assert message.replace("model.embed_tokens.weight", names[0]) in str(caught.value)


def test_files_without_an_index_are_named_where_a_server_would_load_them_too(model: Path):
    shutil.copy(model / "model.safetensors", model / "model-00001-of-00001.safetensors")
    with pytest.raises(ConfigError, match=r"has model-00001-of-00001.safetensors beside model.safetensors and no"):
        load(model)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf_quant_config.json", "by which servers would quantize"),
        ("adapter_config.json", "of an adapter that neither"),
    ],
)
def test_files_that_make_another_model_of_the_weights_are_named(model: Path, name: str, message: str):
    (model / name).write_text("{}")
    with pytest.raises(ConfigError, match=f"has {name}, {message}"):
        load(model)


def test_an_evaluation_names_files_that_differ_from_the_index_too(model: Path):
    index, names = split(model)
    write_index(model, {**index, names[0]: index[names[1]]})
    overrides = ["model=tiny", "model.name=mine", "model.source=path", f"model.path={model}"]
    with pytest.raises(ConfigError, match=f"model.path: {model}: model.safetensors.index.json differs from the files"):
        load_evaluation_inputs({"one": load_config(overrides, "evaluate")})


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_called_one(model: Path, name: str):
    (model / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ConfigError, match=f"model.path: {model / name} is a Git LFS pointer .*`git lfs pull`"):
        load(model)


def test_nan_in_a_small_model_is_found_before_a_process_is_started(model: Path):
    change(model, lambda tensors: tensors[KEY].view(-1)[7].fill_(float("nan")))
    with pytest.raises(ConfigError, match=f"model.path: {model}: NaN or infinity in {KEY}"):
        load(model)


def test_a_key_that_is_missing_and_stands_for_something_else_in_transformers_is_refused(model: Path):
    content = json.loads((model / "config.json").read_text())
    del content["num_key_value_heads"]
    (model / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"num_key_value_heads .*as transformers reads it, and with it the server"):
        load(model)


def test_a_key_of_no_known_effect_is_said(model: Path, capsys: pytest.CaptureFixture[str]):
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**content, "author": "me"}))
    load(model)
    printed = capsys.readouterr().out
    assert "author is not known here and taken to have no effect" in printed
    (model / "config.json").write_text(json.dumps(content))
    load(model)
    assert not capsys.readouterr().out
