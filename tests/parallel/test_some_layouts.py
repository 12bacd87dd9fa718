"""The fastest of the tests of layouts, which `make test` runs; the others of this folder are marked slow."""

from pathlib import Path

import pytest
from check_layouts import LayoutRun, compare_runs, find_problems, run_layouts
from layout_runs import build_spec, continue_state, launch_each, read, save_and_export
from tiny_checkpoints import build_samples, write_checkpoint

from megarl.config.schema.roles import LoraConfig, OptimizerConfig, ParallelConfig
from megarl.mcore.convert import convert, open_source
from megarl.mcore.spec import Role

TP2_SP = ParallelConfig(num_processes=2, tp=2, sp=True)
ROWS = {
    "dense": ("qwen3", TP2_SP, None),
    "experts": ("qwen3_moe", ParallelConfig(num_processes=2, ep=2), None),
    "lora": ("qwen3", TP2_SP, LoraConfig(3, 12.0)),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layouts")
    for family in ("qwen3", "qwen3_moe"):
        write_checkpoint(root / family, family)
    return root


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, LayoutRun]:
    common = {"optimizer": OptimizerConfig(lr=1e-3, eps=1e-5, weight_decay=0.1), "tokens_per_microbatch": 60}
    specs = {}
    for name, (family, layout, lora) in ROWS.items():
        for key, parallel in ((f"{name}-one", ParallelConfig()), (name, layout)):
            specs[key] = build_spec(Role.policy, root / family, parallel=parallel, lora=lora, **common)
    return run_layouts(specs, build_samples(), 2, root / "runs")


@pytest.mark.parametrize("name", ROWS)
def test_two_processes_train_what_one_does(name: str, runs: dict[str, LayoutRun]) -> None:
    assert find_problems(compare_runs(runs[name], runs[f"{name}-one"])) == []
    before, after = runs[name].read("before"), runs[name].read("after")
    assert any(not after[key].equal(before[key]) for key in before)


def test_a_saved_state_goes_on_in_another_layout_and_is_converted_to_what_ranks_export(root: Path) -> None:
    spec = build_spec(Role.policy, root / "qwen3")
    launch_each(2, save_and_export, {"saved": build_spec(Role.policy, root / "qwen3", "tp2_sp")}, scratch=str(root))
    convert(open_source(root / "saved" / "state"), root / "hf")
    found, expected = read(root / "hf"), read(root / "saved" / "export")
    assert found.keys() == expected.keys()
    assert all(found[key].equal(expected[key]) for key in expected)
    one = launch_each(1, continue_state, {"one": spec}, str(root / "saved"))["one"]
    assert all(one["loaded"]["weights"][key].equal(expected[key]) for key in expected)
    assert one["metrics"]["policy/grad_norm"] > 0
