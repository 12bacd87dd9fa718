"""The optimizer's state in a checkpoint: before the first step, and from one Adam to another."""

from pathlib import Path
from typing import Any

import lazy_adam
import pytest
import torch
from layout_runs import build_spec, hash_weights, launch, working
from tiny_checkpoints import build_samples, write_checkpoint

from megarl.config.schema.roles import Dtype
from megarl.mcore.spec import Role, WorkerSpec

pytestmark = pytest.mark.slow

ADAMS = ["torch", "lazy"]


ROWS = [torch.arange(12)]


def find_storages(worker: Any) -> set[int]:
    """Addresses of the optimizer's tensors, without torch's step counts."""
    from megarl.mcore.optimizer import list_optimizer_tensors

    return {tensor.data_ptr() for tensor in list_optimizer_tensors(worker.optimizer) if tensor.ndim}


def save_and_load(rank: int, world_size: int, spec: WorkerSpec, is_lazy: bool, root: Path) -> dict[str, Any]:
    """A save before the first step and one after the second; what a new worker makes of each, as checksums of the
    weights after one more step. Files of the runs before in `root` are continued too, under "other".
    """
    if is_lazy:
        lazy_adam.install()
    name = "lazy" if is_lazy else "torch"
    others = [folder for folder in root.glob("*-stepped") if folder.name != f"{name}-stepped"]
    states = {key: root / f"{name}-{key}" for key in ("fresh", "stepped")}
    result: dict[str, Any] = {"other": {}}
    with working(spec, rank, world_size, root / name) as worker:
        for key, num_steps in (("fresh", 0), ("stepped", 2)):
            worker.update(build_samples(), ROWS * num_steps)
            saved = hash_weights(worker)
            worker.begin_save(states[key])
            worker.finish_save()
            metrics = worker.update(build_samples(), ROWS)
            result[key] = {"saved": saved, "stepped": hash_weights(worker), "metrics": metrics}
            worker.load(states[key])
            result[key]["again"] = hash_weights(worker)
        result["kind"] = type(worker.optimizer.chained_optimizers[0].optimizer).__name__
    for key, folder in [*states.items(), *[("other", folder) for folder in others]]:
        with working(spec, rank, world_size, root / f"{name}-{key}") as worker:
            places = find_storages(worker)
            worker.load(folder)
            loaded, kept = hash_weights(worker), places == find_storages(worker)
            metrics = worker.update(build_samples(), ROWS)
            result[key] |= {"loaded": loaded, "kept": kept, "continued": hash_weights(worker), "after": metrics}
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Experts have an optimizer of their own, which Megatron chains to the other."""
    path = tmp_path_factory.mktemp("adam")
    write_checkpoint(path / "qwen3_moe", "qwen3_moe")
    spec = build_spec(Role.policy, path / "qwen3_moe", "dp2", dtype=Dtype.bfloat16)
    (path / "runs").mkdir()
    found = {name: launch(2, save_and_load, spec, name == "lazy", scratch=path / "runs") for name in ADAMS}
    assert {name: found[name]["kind"] for name in ADAMS} == {"torch": "AdamW", "lazy": "FusedAdam"}
    return found


@pytest.mark.parametrize("adam", ADAMS)
@pytest.mark.parametrize("key", ["fresh", "stepped"])
def test_a_state_is_saved_and_continued_bit_by_bit_also_before_the_first_step(
    runs: dict[str, Any], adam: str, key: str
) -> None:
    found = runs[adam][key]
    assert found["saved"] == found["again"] == found["loaded"]
    assert found["stepped"] == found["continued"] != found["saved"]
    assert found["metrics"] == found["after"]


@pytest.mark.parametrize("adam", ADAMS)
def test_a_load_keeps_the_tensors_that_are_there(runs: dict[str, Any], adam: str) -> None:
    """A second set of moments beside the first would be 8 bytes of GPU memory for each parameter."""
    assert all(runs[adam][key]["kept"] for key in ("fresh", "stepped"))


def test_one_adam_continues_what_the_other_wrote(runs: dict[str, Any]) -> None:
    found, expected = runs["lazy"]["other"], runs["torch"]["stepped"]
    assert found["loaded"] == expected["saved"]
    assert found["after"] == [pytest.approx(expected["metrics"][0], rel=1e-4)]
