"""model.path: files that do not hold the model of config.json are named before any process is started."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.run.evaluation import load_evaluation_inputs
from megarl.run.inputs import load_models

KEY, FIRST = "model.layers.0.mlp.down_proj.weight", "lm_head.weight"
SINGLE, ONE, TWO, INDEX = "model.safetensors", "one.safetensors", "two.safetensors", "model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the checkpoint of model=tiny."""
    shutil.copytree(load_models(load_config(["model=tiny"])).checkpoint, tmp_path / "model")
    return tmp_path / "model"


def load(model: Path) -> None:
    load_models(load_config(["model=checkpoint", f"model.path={model}"]))


def tensors(edit) -> Callable[[Path], object]:
    """Edits the tensors of the one file."""

    def change(model: Path) -> None:
        found = load_file(model / SINGLE)
        edit(found)
        save_file(found, model / SINGLE, metadata={"format": "pt"})

    return change


def split(edit) -> Callable[[Path], object]:
    """Writes the tensors into two files; `edit` changes their index or the files."""

    def change(model: Path) -> None:
        found = load_file(model / SINGLE)
        (model / SINGLE).unlink()
        assert sorted(found)[0] == FIRST
        index = {name: ONE if place % 2 else TWO for place, name in enumerate(sorted(found))}
        for file in (ONE, TWO):
            save_file({name: each for name, each in found.items() if index[name] == file}, model / file)
        edit(index, model)
        (model / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": index}))

    return change


def config(edit) -> Callable[[Path], object]:
    def change(model: Path) -> None:
        content = json.loads((model / "config.json").read_text())
        edit(content)
        (model / "config.json").write_text(json.dumps(content))

    return change


def join_into_one(_index: dict[str, str], model: Path) -> None:
    save_file(load_file(model / ONE) | load_file(model / TWO), model / ONE)


@pytest.mark.parametrize(
    "edit",
    [
        tensors(lambda found: found.update({"visual.weight": found[KEY].clone()})),
        split(lambda _index, model: shutil.copy(model / ONE, model / "older.safetensors")),
    ],
)
def test_further_tensors_and_a_file_that_the_index_does_not_name_are_left_alone(model: Path, edit):
    edit(model)
    load(model)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (tensors(lambda found: found.pop(KEY)), f"missing: {KEY}"),
        (tensors(lambda found: found.update({KEY: found[KEY][:3].clone()})), f"misshaped: {KEY} is [3, 192], config"),
        (tensors(lambda found: found.update({KEY: found[KEY].int()})), "has tensors of I32; float weights are"),
        (tensors(lambda found: found[KEY].view(-1)[7].fill_(float("nan"))), f"NaN or infinity in {KEY}"),
        (lambda model: (model / SINGLE).write_bytes((model / SINGLE).read_bytes()[:-100]), f"{SINGLE}: "),
        (
            split(lambda index, _model: index.update({FIRST: ONE})),
            f"{INDEX} differs from the files: {FIRST} is in {TWO}, by the index in {ONE}",
        ),
        (split(lambda index, _model: index.pop(FIRST)), f"{FIRST} is in {TWO}, by the index in none"),
        (split(lambda _index, model: (model / ONE).unlink()), f"lacks {ONE}, of 2 files that {INDEX} names"),
        (split(join_into_one), f"{FIRST} is in {ONE} and {TWO}, by the index in {TWO}"),
        (
            split(lambda _index, model: shutil.copy(model / ONE, model / SINGLE)),
            f"has {SINGLE} and {INDEX}, which names other files",
        ),
        (
            lambda model: shutil.copy(model / SINGLE, model / "model-00001-of-00001.safetensors"),
            f"has model-00001-of-00001.safetensors beside {SINGLE} and no",
        ),
        (lambda model: (model / "hf_quant_config.json").write_text("{}"), "by which servers would quantize"),
        (lambda model: (model / "adapter_config.json").write_text("{}"), "of an adapter that neither"),
        *(
            (lambda model, name=name: (model / name).write_text(POINTER), f"{name} is a Git LFS pointer")
            for name in (SINGLE, "config.json", "tokenizer.json")
        ),
        (config(lambda content: content.pop("num_key_value_heads")), "as transformers reads it, and with it the"),
    ],
)
def test_files_that_do_not_hold_the_model_are_named_with_what_differs(model: Path, edit, message: str):
    edit(model)
    with pytest.raises(ConfigError) as caught:
        load(model)
    assert f"model.path: {model}" in str(caught.value)
    assert message in str(caught.value)


def test_an_evaluation_names_files_that_differ_from_the_index_too(model: Path):
    split(lambda index, _model: index.update({FIRST: ONE}))(model)
    overrides = ["model=tiny", "model.name=mine", "model.source=path", f"model.path={model}"]
    with pytest.raises(ConfigError, match=f"model.path: {model}: {INDEX} differs from the files"):
        load_evaluation_inputs({"one": load_config(overrides, "evaluate")})


def test_a_key_of_no_known_effect_is_said(model: Path, capsys: pytest.CaptureFixture[str]):
    load(model)
    assert not capsys.readouterr().out
    config(lambda content: content.update({"author": "me"}))(model)
    load(model)
    assert "author is not known here and taken to have no effect" in capsys.readouterr().out
