from pathlib import Path

import pytest
import torch
from compare_layouts import Bounds, LayoutRun, compare_runs, describe_layout
from safetensors.torch import save_file
from torch import Tensor

from megarl.config.schema.roles import ParallelConfig
from megarl.mcore.spec import Role

WEIGHTS = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([[1.0]])}
GRADIENT = {"a": torch.tensor([0.6, 0.8]), "b": torch.tensor([[10.0]])}


def write_run(
    directory: Path, gradient: dict[str, Tensor] = GRADIENT, step: float = 0.1, loss: float = 1.0, norm: float = 10.05
) -> LayoutRun:
    kinds = {"before": WEIGHTS, "gradient": gradient, "after": {k: v + step for k, v in WEIGHTS.items()}}
    for kind, tensors in kinds.items():
        (directory / kind).mkdir(parents=True)
        save_file(tensors, directory / kind / "model.safetensors")
    metrics = [{"policy/loss": loss, "policy/loss_size": 2.0, "policy/grad_norm": norm}] * 3
    return LayoutRun(Role.policy, metrics, directory)


def test_a_run_equals_itself(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    difference = compare_runs(run, run)
    assert difference.find_problems() == []
    assert (difference.loss, difference.grad_norm) == (1.0, 10.05)


def test_differences_are_relative_to_the_size_of_what_is_compared(tmp_path: Path) -> None:
    gradient = {"a": torch.tensor([0.6, 0.8 + 1e-4]), "b": torch.tensor([[10.0 + 2e-4]])}
    other = write_run(tmp_path / "other", gradient, step=0.2, loss=1.5, norm=10.05 * 1.1)
    difference = compare_runs(other, write_run(tmp_path / "reference"))
    # |1.5 - 1| of a mean |L_t| of 2; ||a|| is 1, so that a is worse than b; every weight moved 0.2 instead of 0.1.
    assert difference.loss_difference == pytest.approx(0.25)
    assert difference.grad_norm_difference == pytest.approx(0.1)
    assert difference.gradient_difference == pytest.approx(1e-4, rel=1e-2)
    assert difference.gradient_tensor == "a"
    assert difference.update_difference == pytest.approx(1.0, rel=1e-5)
    assert difference.parameter_difference == pytest.approx(0.1, rel=1e-5)


def test_what_is_beyond_its_bound_is_named(tmp_path: Path) -> None:
    gradient = {"a": GRADIENT["a"], "b": GRADIENT["b"] * (1 + 3e-5)}
    reference = write_run(tmp_path / "reference")
    (problem,) = compare_runs(write_run(tmp_path / "other", gradient), reference).find_problems()
    assert problem == "gradient of b: differs by 3e-05 of its norm; the bound is 1e-05"
    assert compare_runs(write_run(tmp_path / "again", gradient), reference).find_problems(Bounds(gradient=1e-4)) == []


def test_nan_is_beyond_every_bound(tmp_path: Path) -> None:
    gradient = {"a": torch.tensor([torch.nan, 0.0]), "b": GRADIENT["b"]}
    bad = write_run(tmp_path / "bad", gradient, step=float("nan"), loss=float("nan"), norm=float("nan"))
    problems = compare_runs(bad, write_run(tmp_path / "reference")).find_problems()
    assert [problem.split(":")[0] for problem in problems] == ["loss", "gradient norm", "gradient of a", "update"]


def test_runs_of_other_models_are_refused(tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", {"c": torch.zeros(1)})
    with pytest.raises(ValueError, match="other tensors than in"):
        compare_runs(other, write_run(tmp_path / "reference"))


@pytest.mark.parametrize(
    ("parallel", "name"),
    [
        (ParallelConfig(), "one"),
        (ParallelConfig(num_processes=8, tp=2, sp=True, pp=2, vpp=3), "tp2-sp-pp2-vpp3-dp2"),
        (ParallelConfig(num_processes=2, ep=2), "dp2-ep2"),
    ],
)
def test_a_layout_has_a_short_name(parallel: ParallelConfig, name: str) -> None:
    assert describe_layout(parallel) == name
