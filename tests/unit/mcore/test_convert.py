"""Conversion there and back: exact, and refusals that name what is wrong and leave nothing behind."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import find_constants, write_checkpoint

from megarl.config.load import MODEL_FILE
from megarl.config.schema.roles import Dtype
from megarl.files import RUN_FILE, CheckpointError, load_manifest
from megarl.mcore import convert as conversion
from megarl.mcore.convert import compare_tensors, open_source
from megarl.mcore.spec import Role
from megarl.models.families import FAMILIES

QUERY = "model.layers.1.self_attn.q_proj.weight"


def convert(source: Path, target: Path, role: Role | None = None, verify: bool = True, **options: Any) -> None:
    conversion.convert(open_source(source, role=role, verify=verify), target, **options)


def change(directory: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "hf", "llama")
    return tmp_path / "hf"


@pytest.fixture
def megatron(hf: Path, tmp_path: Path) -> Path:
    convert(hf, tmp_path / "megatron")
    return tmp_path / "megatron"


def test_a_converted_model_keeps_the_settings_of_its_run(hf: Path, tmp_path: Path) -> None:
    (tmp_path / "iteration-1").mkdir()
    convert(hf, tmp_path / "iteration-1" / "policy")
    (tmp_path / "iteration-1" / RUN_FILE).write_text("of a run")
    convert(tmp_path / "iteration-1" / "policy", tmp_path / "back")
    convert(tmp_path / "back", tmp_path / "again")
    convert(tmp_path / "again", tmp_path / "last")
    assert [(tmp_path / name / MODEL_FILE).read_text() for name in ("back", "again", "last")] == ["of a run"] * 3


@pytest.mark.parametrize(
    ("family", "tied"),
    [*((family, False) for family in FAMILIES), ("llama", True), ("qwen3", True)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back_is_bit_equal(family: str, tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "hf", family, tied=tied)
    constants = [buffer.clone() for buffer in find_constants(model)]
    model.to(dtype)
    # As in published checkpoints the correction bias of a router stays in float32.
    for buffer, constant in zip(find_constants(model), constants, strict=True):
        buffer.data = constant
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text('{"a": 1}\n')
    convert(tmp_path / "hf", tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer.json").read_text() == '{"a": 1}\n'
    found, expected = (load_file(tmp_path / x / "model.safetensors") for x in ("back", "hf"))
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == tensor.dtype and found[name].equal(tensor) for name, tensor in expected.items())
    assert {x.dtype for name, x in found.items() if not name.endswith("e_score_correction_bias")} == {dtype}
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads(
        (tmp_path / "hf/config.json").read_text()
    )


def test_a_policy_becomes_a_critic_with_a_head_of_zeros_and_that_a_classifier(hf: Path, tmp_path: Path) -> None:
    convert(hf, tmp_path / "critic", Role.critic)
    convert(tmp_path / "critic", tmp_path / "back")
    layout = {"tp": 1, "pp": 1, "dp": 1, "cp": 1, "ep": 1}
    about = {"kind": "megatron", "role": "critic", "dtype": "float32", "parallel": layout, "iteration": None}
    assert load_manifest(tmp_path / "critic").about == about
    expected = load_file(hf / "model.safetensors")
    expected["score.weight"] = torch.zeros(1, 64)
    del expected["lm_head.weight"]
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(found[name].equal(tensor) for name, tensor in expected.items())
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["architectures"], config["num_labels"]) == (["LlamaForSequenceClassification"], 1)


def test_another_dtype_rounds_as_torch_does_and_config_json_says_it(hf: Path, tmp_path: Path) -> None:
    convert(hf, tmp_path / "megatron", dtype=Dtype.bfloat16)
    convert(tmp_path / "megatron", tmp_path / "back", dtype=Dtype.float32)
    found, expected = (load_file(x / "model.safetensors") for x in (tmp_path / "back", hf))
    assert all(found[name].equal(expected[name].bfloat16().float()) for name in expected)
    assert json.loads((tmp_path / "megatron/hf/config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == "float32"


def break_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[QUERY][3, 5] = torch.nan


@pytest.mark.parametrize(
    ("edit", "tied", "message"),
    [
        (lambda x: x.pop(QUERY), False, f"missing: {QUERY}"),
        (lambda x: x.update({QUERY + ".lora": torch.zeros(3)}), False, f"of another model: {QUERY}.lora"),
        (lambda x: x.update({QUERY: x[QUERY][:-1].clone()}), False, rf"misshaped: {QUERY} is \[63, 64\], config.json"),
        (break_nan, False, f"{QUERY} has NaN or infinity"),
        (lambda x: x[QUERY].view(-1)[7:8].fill_(-torch.inf), False, f"{QUERY} has NaN or infinity"),
        (lambda x: x["lm_head.weight"].add_(1), True, r"lm_head\.weight is not model\.embed_tokens\.weight"),
        (None, False, r"hf/model\.safetensors"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name_and_nothing_is_left(
    edit: Callable[[dict[str, torch.Tensor]], Any] | None, tied: bool, message: str, hf: Path, tmp_path: Path
) -> None:
    """Without an edit the file is cut off."""
    if tied:
        write_checkpoint(hf, "llama", tied=True)
    if edit is None:
        (hf / "model.safetensors").write_bytes((hf / "model.safetensors").read_bytes()[:-100])
    else:
        change(hf, lambda x: (x.setdefault("lm_head.weight", x["model.embed_tokens.weight"].clone()), edit(x)))
    with pytest.raises(CheckpointError, match=message) as caught:
        convert(hf, tmp_path / "megatron")
    assert str(hf) in str(caught.value)
    assert list(tmp_path.iterdir()) == [hf]


def change_middle(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def add_layers(content: bytes) -> bytes:
    return json.dumps({**json.loads(content), "num_hidden_layers": 4}).encode()


@pytest.mark.parametrize(
    ("file", "damage", "verify", "message"),
    [
        ("__0_0.distcp", change_middle, True, r"damaged: __0_0\.distcp"),
        ("__0_0.distcp", lambda content: content[:-100], False, "megatron"),
        ("__0_0.distcp", lambda content: b"x" * len(content), False, "megatron"),
        ("__0_0.distcp", None, False, "megatron"),
        ("hf/config.json", add_layers, False, r"linear_qkv\.weight is \[2, 128, 64\], config\.json asks for \[4, 128"),
    ],
)
def test_damaged_files_and_those_of_another_model_are_refused_with_checksums_and_without(
    file: str, damage: Callable[[bytes], bytes] | None, verify: bool, message: str, megatron: Path, tmp_path: Path
) -> None:
    if damage is None:
        (megatron / file).unlink()
    else:
        (megatron / file).write_bytes(damage((megatron / file).read_bytes()))
    with pytest.raises((CheckpointError, FileNotFoundError), match=message):
        convert(megatron, tmp_path / "back", verify=verify)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["hf", "megatron"]


def test_nan_in_megatrons_files_is_refused_by_name(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(hf, break_nan)
    with monkeypatch.context() as patch:
        patch.setattr(conversion.state, "is_finite", lambda tensor: True)
        convert(hf, tmp_path / "megatron")
    with pytest.raises(CheckpointError, match=f"{QUERY} has NaN or infinity"):
        convert(tmp_path / "megatron", tmp_path / "back")
    assert not (tmp_path / "back").exists()


class Malice:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("hidden_in_metadata", [False, True])
def test_a_foreign_pickle_is_named_and_not_run(hidden_in_metadata: bool, megatron: Path, tmp_path: Path) -> None:
    path, content = megatron / ".metadata", Malice(tmp_path / "touched")
    if hidden_in_metadata:
        metadata = pickle.loads(path.read_bytes())
        metadata.planner_data = content
        content = metadata
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match=r"\.metadata: refers to pathlib\.Path"):
        convert(megatron, tmp_path / "back", verify=False)
    assert not (tmp_path / "touched").exists()


def test_a_target_that_exists_is_kept_unless_it_is_to_be_overwritten(hf: Path, megatron: Path, tmp_path: Path) -> None:
    back = tmp_path / "back"
    back.mkdir()
    (back / "mine").write_text("kept")
    with pytest.raises(FileExistsError, match="--overwrite"):
        convert(megatron, back)
    assert (back / "mine").read_text() == "kept"
    convert(megatron, back, overwrite=True)
    assert not (back / "mine").exists()
    assert sorted(x.name for x in tmp_path.iterdir()) == ["back", "hf", "megatron"]


def test_the_comparison_names_the_one_tensor_that_differs_and_refuses_other_shapes(hf: Path, megatron: Path) -> None:
    assert compare_tensors(open_source(hf), open_source(megatron)) == []
    change(hf, lambda tensors: tensors[QUERY][1, 1].add_(0.5))
    assert compare_tensors(open_source(hf), open_source(megatron)) == [f"{QUERY}: differs by up to 0.5"]
    write_checkpoint(hf, "llama", intermediate_size=128)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight is \[64, 128\], .* it is \[64, 96\]"):
        compare_tensors(open_source(hf), open_source(megatron))


@pytest.mark.parametrize("place", ["hf", "hf/megatron", "."])
def test_a_target_that_is_in_or_around_its_source_is_refused_and_the_source_stays(
    hf: Path, tmp_path: Path, place: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="the target must be apart from the source"):
        convert(hf, tmp_path / place, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("file", ["../hf/model.safetensors", "/etc/passwd", "..", 3])
def test_an_index_that_leads_out_of_its_directory_is_refused_by_tensor_and_file(hf: Path, file: str | int) -> None:
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {QUERY: file}}))
    with pytest.raises(CheckpointError, match=f"{QUERY} is in {file!r}; a file of this directory was expected"):
        open_source(hf)
