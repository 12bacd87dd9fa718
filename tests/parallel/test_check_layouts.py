"""check_layouts.py: which layouts it proposes, real updates under every layout of two processes, its exit codes.

Four processes: test_equal_layouts.py, the same comparison.
"""

import subprocess
import sys
from pathlib import Path

import check_layouts
import pytest
from compare_layouts import describe_layout
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.load import load_config
from megarl.config.schema.roles import ParallelConfig
from megarl.mcore.spec import Role
from megarl.run.inputs import load_models, load_specs

TWO = {"one", "dp2", "cp2", "pp2", "pp2-vpp2", "tp2", "tp2-sp"}


def list_names(role: Role, num_processes: int, *overrides: str) -> set[str]:
    """Of the layouts that fit the role."""
    config = load_config(["model=tiny", *overrides])
    models = load_models(config)
    spec = load_specs(config, models)[role]
    layouts = check_layouts.list_layouts(
        num_processes,
        models.architecture.num_layers,
        lambda layout: not check_layouts.find_layout_problems(config, models.architecture, spec, layout),
    )
    names = [describe_layout(layout) for layout in layouts]
    assert len(set(names)) == len(names), "two layouts with one name"
    return set(names)


@settings(max_examples=50)
@given(num_processes=st.integers(1, 12), num_layers=st.integers(1, 8))
def test_every_layout_is_proposed_once_and_its_processes_divide_the_given_number(
    num_processes: int, num_layers: int
) -> None:
    layouts = check_layouts.list_layouts(
        num_processes, num_layers, lambda layout: layout.num_processes % layout.tp == 0
    )
    assert all(num_processes % layout.num_processes == 0 for layout in layouts)
    assert len({repr(layout) for layout in layouts}) == len(layouts)
    sizes = [layout.num_processes for layout in layouts]
    assert sizes == sorted(sizes)
    assert layouts[0] == ParallelConfig()


def test_four_processes_have_the_mixtures_and_nothing_that_the_model_does_not_divide_into() -> None:
    names = list_names(Role.policy, 4, "model.random.num_layers=4")
    mixtures = {"pp2-dp2", "tp2-cp2", "tp2-sp-pp2", "tp2-sp-pp2-vpp2", "pp2-cp2", "tp2-sp-cp2", "cp2-dp2", "cp4", "dp4"}
    assert names > TWO | mixtures | {"pp4"}
    # Four ranks share two key-value heads by holding each twice.
    assert {"tp4", "tp4-sp"} < names
    # Four layers do not make eight pieces, a dense model has no experts.
    assert not any("ep" in name or name == "pp4-vpp2" for name in names)


def test_a_layout_with_too_few_samples_for_its_ranks_is_left_out() -> None:
    names = list_names(Role.policy, 4, "train.samples_per_minibatch=2")
    assert "dp2" in names
    assert "dp4" not in names


@pytest.mark.parametrize(("role", "fits"), [(Role.policy, False), (Role.critic, True)])
def test_a_full_kl_leaves_pipelines_to_the_critic_alone(role: Role, fits: bool) -> None:
    names = list_names(role, 2, "algo.kl.in_loss=true", "algo.kl.loss_estimator=full")
    assert ("pp2" in names) is fits


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
    assert len(rows) == 14
    assert all(row[-1] == "equal" for row in rows)
    assert all(float(row[4]) > 0 for row in rows), "a gradient that is zero everywhere is equal to anything"
    assert lines[-1] == "equal: all 14 compute what one process computes"
    assert {line.count("|") for line in lines if line.startswith("|")} == {11}


def test_a_wrong_key_ends_it_with_code_2_before_anything_starts() -> None:
    code, lines, errors = run_command("model=tiny", "algo.clip_hgh=0.3")
    assert (code, lines) == (2, [])
    assert "algo.clip_hgh" in errors
