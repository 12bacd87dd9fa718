"""check_layouts.py: which layouts it proposes, real updates under every layout of two processes, what it calls equal.

Four processes: test_layouts.py, the same comparison.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import check_layouts
import pytest
import torch
from check_layouts import compare_runs, describe_layout, find_problems
from layout_runs import Run, build_spec, read_layout
from safetensors.torch import save_file

from megarl.config.load import load_config
from megarl.config.schema.roles import ParallelConfig
from megarl.mcore.spec import Role
from megarl.run.inputs import load_models, load_specs

TWO = {"one", "dp2", "cp2", "pp2", "pp2-vpp2", "tp2", "tp2-sp"}
WEIGHTS = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([[1.0]])}
GRADIENT = {"a": torch.tensor([0.6, 0.8]), "b": torch.tensor([[10.0]])}


def test_four_processes_have_the_mixtures_and_nothing_that_the_model_does_not_divide_into() -> None:
    config = load_config(["model=tiny", "model.random.num_layers=4"])
    models = load_models(config)
    spec, arch = load_specs(config, models)[Role.policy], models.architecture
    layouts = check_layouts.list_layouts(4, 4, lambda layout: check_layouts.is_allowed(config, arch, spec, layout))
    names = {describe_layout(layout) for layout in layouts}
    assert len(names) == len(layouts), "two layouts with one name"
    mixtures = {"pp2-dp2", "tp2-cp2", "tp2-sp-pp2", "tp2-sp-pp2-vpp2", "pp2-cp2", "tp2-sp-cp2", "cp2-dp2", "cp4", "dp4"}
    # Four ranks share two key-value heads by holding each twice.
    assert names > TWO | mixtures | {"pp4", "tp4", "tp4-sp"}
    # Four layers do not make eight pieces, a dense model has no experts.
    assert not any("ep" in name or name == "pp4-vpp2" for name in names)


def run_command(*arguments: str) -> tuple[int, list[str], str]:
    command = [sys.executable, str(Path(check_layouts.__file__)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.slow
def test_policy_and_critic_compute_the_same_under_every_layout_of_two_processes() -> None:
    overrides = ("model=tiny", "model.random.num_layers=4", "algo.value_clip=0.2", "algo.entropy_coef=0.01")
    code, lines, errors = run_command("--processes", "2", "--rows", "8", *overrides)
    assert code == 0, "\n".join([*lines, errors])
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith(("| policy", "| critic"))]
    assert {(row[0], row[1]) for row in rows} == {(role, name) for role in ("policy", "critic") for name in TWO}
    assert all(row[-1] == "equal" for row in rows)
    assert lines[-1] == "equal: all 14 compute what one process computes"


def test_a_wrong_key_ends_it_with_code_2_before_anything_starts() -> None:
    code, lines, errors = run_command("model=tiny", "algo.clip_hgh=0.3")
    assert (code, lines) == (2, [])
    assert "algo.clip_hgh" in errors


def write_run(directory: Path, gradient: Any = None, step: float = 0.1, loss: float = 1.0, norm: float = 10.05) -> Run:
    after = {key: tensor + step for key, tensor in WEIGHTS.items()}
    for kind, tensors in {"before": WEIGHTS, "gradient": GRADIENT | (gradient or {}), "after": after}.items():
        (directory / kind).mkdir(parents=True)
        save_file(tensors, directory / kind / "model.safetensors")
    metrics = [{"policy/loss": loss, "policy/loss_size": 2.0, "policy/grad_norm": norm}] * 3
    found = {"metrics": metrics, "evaluate": [torch.full((2, 3), loss)]}
    return Run(build_spec(Role.policy, directory), directory, found)


DIFFERENCES = ("loss", "gradient norm", "gradient of a", "update", "evaluation")
NAN = float("nan")


@pytest.mark.parametrize(
    ("gradient", "changes", "expected"),
    [
        ({}, {}, [0, 0, 0, 0, 0]),
        # |1.5 - 1| of a mean |L_t| of 2; ||a|| is 1, so that a is worse than b; every weight moved 0.2 instead of 0.1.
        ([0.6, 0.8 + 1e-4], {"step": 0.2, "loss": 1.5, "norm": 10.05 * 1.1}, [0.25, 0.1, 1e-4, 1.0, 0.5]),
        ([NAN, 0.0], {"step": NAN, "loss": NAN, "norm": NAN}, [float("inf")] * 5),
    ],
)
def test_differences_are_relative_to_the_size_of_what_is_compared_and_infinite_of_nan(
    gradient: Any, changes: dict[str, float], expected: list[float], tmp_path: Path
) -> None:
    own = {"a": torch.tensor(gradient)} if gradient else {}
    reference, other = write_run(tmp_path / "reference"), write_run(tmp_path / "other", own, **changes)
    differences = compare_runs(other, reference)
    assert differences == pytest.approx(dict(zip(DIFFERENCES, expected, strict=True)), rel=1e-2)
    wrong = [what for what, found in zip(DIFFERENCES, expected, strict=True) if found]
    assert [problem.split(":")[0] for problem in find_problems(differences)] == wrong


def test_a_layout_has_a_short_name_which_is_read() -> None:
    parallel = ParallelConfig(num_processes=12, tp=2, sp=True, pp=2, vpp=3, cp=1)
    assert describe_layout(parallel) == "tp2-sp-pp2-vpp3-dp3"
    assert read_layout("tp2-sp-pp2-vpp3-dp3") == parallel
