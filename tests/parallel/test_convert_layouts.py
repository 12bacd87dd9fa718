"""Checkpoints that ranks of several layouts save and load, against the conversion in one process."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from layout_runs import build_spec, launch_each, load_converted, save_and_export
from safetensors.torch import load_file
from tiny_checkpoints import write_checkpoint

from megarl.config.schema.roles import Dtype, ParallelConfig
from megarl.mcore.convert import compare_tensors, convert, open_source
from megarl.mcore.spec import Role

pytestmark = pytest.mark.slow

DENSE = ParallelConfig(num_processes=4, tp=2, sp=True, pp=2)
EXPERTS = ParallelConfig(num_processes=4, tp=2, sp=True, pp=2, ep=2)
OTHER = {
    "qwen3": ParallelConfig(num_processes=2, tp=2),
    "qwen3_moe": ParallelConfig(num_processes=2, ep=2),
    "llama": ParallelConfig(num_processes=2, pp=2),
    "glm4": ParallelConfig(num_processes=2, tp=2),
    "glm4_moe": ParallelConfig(num_processes=2, ep=2),
    "critic": ParallelConfig(num_processes=2),
}
"""Layouts that load, each another than the one that saved"""


def build_specs(root: Path, layouts: dict[str, ParallelConfig]) -> dict[str, Any]:
    specs = {}
    for name, layout in layouts.items():
        family = "llama" if name == "critic" else name
        role = Role.critic if name == "critic" else Role.policy
        dtype = Dtype.bfloat16 if name == "llama" else Dtype.float32
        specs[name] = build_spec(role, root / f"start-{family}", parallel=layout, dtype=dtype)
    return specs


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for family in OTHER.keys() - {"critic"}:
            write_checkpoint(root / f"start-{family}", family, tied=family == "qwen3", num_hidden_layers=4)
            (root / f"start-{family}" / "chat_template.jinja").write_text("{{ messages }}")
        saved = build_specs(root, {x: EXPERTS if "moe" in x else DENSE for x in OTHER})
        launch_each(4, save_and_export, saved, scratch=scratch)
        yield root


@pytest.mark.parametrize("name", OTHER)
def test_what_ranks_saved_becomes_bit_by_bit_what_they_export(name: str, root: Path) -> None:
    directory = root / name
    source = open_source(directory / "state")
    assert (source.about["iteration"], source.holds_optimizer) == (7, True)
    convert(source, directory / "hf")
    found, expected = (load_file(directory / x / "model.safetensors") for x in ("hf", "export"))
    start = load_file(root / f"start-{'llama' if name == 'critic' else name}" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(found[x].dtype == expected[x].dtype and found[x].equal(expected[x]) for x in expected)
    assert not all(start[x].equal(found[x].float()) for x in start.keys() & found.keys()), "nothing was trained"
    assert (directory / "hf" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_saved_critic_becomes_a_classifier_that_transformers_loads(root: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    convert(open_source(root / "critic" / "state"), root / "classifier")
    model, info = AutoModelForSequenceClassification.from_pretrained(root / "classifier", output_loading_info=True)
    assert type(model).__name__ == "LlamaForSequenceClassification"
    assert not any(info.values())
    assert model.score.weight.abs().sum() > 0


def test_ranks_of_another_layout_load_what_was_converted_and_train_on_from_it(root: Path) -> None:
    for name in OTHER:
        source = open_source(root / name / "export")
        convert(source, root / name / "converted")
        assert compare_tensors(source, open_source(root / name / "converted")) == []
    specs = build_specs(root, OTHER)
    starts = {name: (replace(spec, checkpoint=str(root / name / "export")), False) for name, spec in specs.items()}
    started = launch_each(2, load_converted, starts, scratch=str(root))
    converted = launch_each(2, load_converted, {x: (spec, True) for x, spec in specs.items()}, scratch=str(root))
    for name, found in converted.items():
        fresh, loaded, trained = found["sums"]
        assert fresh != loaded, name
        assert [loaded, trained] == started[name]["sums"][1:], name
        assert "without an optimizer's state" in found["refusal"], name
