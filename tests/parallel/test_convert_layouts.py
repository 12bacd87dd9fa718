"""Checkpoints that ranks of several layouts save and load, against the conversion in one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from layout_runs import Run, build_spec, read, run_specs
from safetensors.torch import load_file
from tiny_checkpoints import write_checkpoint

from megarl.config.schema.roles import Dtype, LoraConfig, LoraLayers
from megarl.mcore.convert import compare_tensors, convert, open_source
from megarl.mcore.spec import Role

pytestmark = pytest.mark.slow

ROWS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "qwen3": ("qwen3", "tp2-sp-pp2", "tp2", {}),
    "qwen3_moe": ("qwen3_moe", "tp2-sp-pp2-ep2", "dp2-ep2", {}),
    "llama": ("llama", "tp2-sp-pp2", "pp2", {"dtype": Dtype.bfloat16}),
    "glm4": ("glm4", "tp2-sp-pp2", "tp2", {}),
    "glm4_moe": ("glm4_moe", "tp2-sp-pp2-ep2", "dp2-ep2", {}),
    "critic": ("llama", "tp2-sp-pp2", "dp2", {"role": Role.critic}),
}
"""Family, the layout that saves, another one that loads, and of the role what is not as usual"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("convert")
    for family in {family for family, *_ in ROWS.values()}:
        write_checkpoint(root / family, family, tied=family == "qwen3", num_hidden_layers=4)
        (root / family / "chat_template.jinja").write_text("{{ messages }}")
    return root


def build_specs(root: Path, number: int) -> dict[str, Any]:
    """number: of the layout in the rows."""
    return {
        name: build_spec(**{"role": Role.policy, "checkpoint": root / row[0], "layout": row[number], **row[3]})
        for name, row in ROWS.items()
    }


@pytest.fixture(scope="module")
def saved(root: Path) -> dict[str, Run]:
    return run_specs(root / "saved", build_specs(root, 1), "update weights:export save:NAME-state")


@pytest.mark.parametrize("name", ROWS)
def test_what_ranks_saved_becomes_bit_by_bit_what_they_export(name: str, root: Path, saved: dict[str, Run]) -> None:
    source = open_source(root / "saved" / f"{name}-state")
    assert (source.about["iteration"], source.holds_optimizer) == (7, True)
    convert(source, root / f"{name}-hf")
    found, expected, start = read(root / f"{name}-hf"), saved[name].read("export"), read(root / ROWS[name][0])
    assert found.keys() == expected.keys()
    assert all(found[x].dtype == expected[x].dtype and found[x].equal(expected[x]) for x in expected)
    assert not all(start[x].equal(found[x].float()) for x in start.keys() & found.keys()), "nothing was trained"
    assert (root / f"{name}-hf" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_saved_critic_becomes_a_classifier_that_transformers_loads(root: Path, saved: dict[str, Run]) -> None:
    from transformers import AutoModelForSequenceClassification

    convert(open_source(root / "saved" / "critic-state"), root / "classifier")
    model, info = AutoModelForSequenceClassification.from_pretrained(root / "classifier", output_loading_info=True)
    assert type(model).__name__ == "LlamaForSequenceClassification"
    assert not any(info.values())
    assert model.score.weight.abs().sum() > 0


def test_ranks_of_another_layout_load_what_was_converted_and_train_on_from_it(
    root: Path, saved: dict[str, Run]
) -> None:
    starts, loads = {}, {}
    for name, spec in build_specs(root, 2).items():
        export, converted = saved[name].directory / "export", root / "loaded" / f"{name}-converted"
        convert(open_source(export), converted)
        assert compare_tensors(open_source(export), open_source(converted)) == []
        starts[name] = replace(spec, checkpoint=str(export))
        loads[name] = (
            spec,
            {"verbs": f"checksum refused:{converted} load_weights:{converted} checksum update checksum"},
        )
    started, loaded = run_specs(root / "started", starts, "checksum update checksum"), run_specs(root / "loaded", loads)
    for name, run in loaded.items():
        assert run["checksum"][0] != run["checksum"][1], name
        assert run["checksum"][1:] == started[name]["checksum"], name
        assert "without an optimizer's state" in run["refused"][0], name


@pytest.mark.parametrize(
    ("role", "family", "layout"),
    [
        (Role.policy, "qwen2", "pp2-vpp2"),
        (Role.policy, "qwen3_moe", "tp2-sp-ep2"),
        (Role.critic, "qwen2", "tp2-sp-pp2"),
    ],
)
def test_a_saved_state_with_adapters_is_converted_to_what_the_ranks_export(
    role: Role, family: str, layout: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / family, family, num_hidden_layers=4)
    lora = LoraConfig(3, 12.0, [LoraLayers.attention])
    spec = build_spec(role, tmp_path / family, layout, lora=lora)
    run = run_specs(tmp_path, {"saved": spec}, "update:2 weights:after save:state")["saved"]
    convert(open_source(tmp_path / "state"), tmp_path / "hf")
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        found, expected = (load_file(path / file) for path in (tmp_path / "hf", run.directory / "after"))
        assert found.keys() == expected.keys()
        assert all(found[key].equal(expected[key]) for key in expected), file
