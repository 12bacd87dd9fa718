"""The fastest of the tests of layouts, which `make test` runs; the others of this folder are marked slow."""

from pathlib import Path

import pytest
from check_layouts import compare_runs, find_problems, run_layouts
from layout_runs import Run, build_spec, read, run_specs
from tiny_checkpoints import build_samples, write_checkpoint

from megarl.config.schema.roles import LoraConfig, OptimizerConfig
from megarl.mcore.convert import convert, open_source
from megarl.mcore.spec import Role

OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-5, weight_decay=0.1)
ROWS = {
    "dense": ("qwen3", "tp2-sp", None),
    "experts": ("qwen3_moe", "dp2-ep2", None),
    "lora": ("qwen3", "tp2-sp", LoraConfig(3, 12.0)),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layouts")
    for family in ("qwen3", "qwen3_moe"):
        write_checkpoint(root / family, family)
    return root


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, Run]:
    specs = {
        f"{name}-{key}": build_spec(
            Role.policy, root / family, layout, lora=lora, optimizer=OPTIMIZER, tokens_per_microbatch=60
        )
        for name, (family, own, lora) in ROWS.items()
        for key, layout in (("one", "one"), ("two", own))
    }
    return run_layouts(root / "runs", specs, build_samples())


@pytest.mark.parametrize("name", ROWS)
def test_two_processes_train_what_one_does(name: str, runs: dict[str, Run]) -> None:
    one, two = runs[f"{name}-one"], runs[f"{name}-two"]
    assert find_problems(compare_runs(two, one)) == []
    before, after = two.read("before"), two.read("after")
    assert any(not after[key].equal(before[key]) for key in before)


def test_a_saved_state_goes_on_in_another_layout_and_is_converted_to_what_ranks_export(root: Path) -> None:
    spec = build_spec(Role.policy, root / "qwen3", "tp2-sp")
    saved = run_specs(root, {"saved": spec}, "update weights:export save:state")["saved"]
    convert(open_source(root / "state"), root / "hf")
    one = run_specs(root, {"one": build_spec(Role.policy, root / "qwen3")}, "load:state weights:loaded update")["one"]
    expected = saved.read("export")
    for found in (read(root / "hf"), one.read("loaded")):
        assert found.keys() == expected.keys()
        assert all(found[key].equal(expected[key]) for key in expected)
    assert one.list_metrics("grad_norm")[0] > 0
