"""Does a model compute the same under every parallel layout?

    MEGARL_LAYOUTS="4 KEY=VALUE ..." python -m pytest -s tests/parallel/test_every_layout.py -k every_layout

For the configuration that `megarl train KEY=VALUE ...` would run: policy and critic take three Adam steps on one
minibatch of random tokens under every layout that fits 1, 2 ... 4 processes and that the model and Megatron allow; each
is compared with one process, by its losses, gradients and updates, in a row of a table. A layout changes who computes
what, and nothing of the result but rounding. Adam's epsilon is 1e-5 at least: a smaller one turns rounding in tiny
gradients into whole steps. In bfloat16 rounding alone is large, and only gross faults show.

What is not marked slow here is the part of the tests of layouts that `make test` runs.
"""

import itertools
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_runs import (
    BOUNDS,
    FLOAT32,
    Run,
    build_spec,
    compare_runs,
    describe_layout,
    find_problems,
    read,
    read_layout,
    run_layouts,
    run_specs,
)
from safetensors.torch import save_file
from tiny_checkpoints import build_samples, write_checkpoint

from megarl.config.checks import check_config
from megarl.config.load import load_config
from megarl.config.overrides import take_config_dirs
from megarl.config.schema.roles import LoraConfig, OptimizerConfig, ParallelConfig
from megarl.config.schema.root import Config
from megarl.mcore.convert import convert, open_source
from megarl.mcore.spec import Role, WorkerSpec, check_layout, check_role_fields
from megarl.models.architecture import Architecture
from megarl.models.checkpoint import load_tokenizer
from megarl.run.inputs import load_models, load_specs

SMALL = "model=tiny model.random.num_layers=4 train.samples_per_minibatch=8 algo.value_clip=0.2 algo.entropy_coef=0.01"
NUM_PROCESSES, *OVERRIDES = take_config_dirs(shlex.split(os.environ.get("MEGARL_LAYOUTS", f"2 {SMALL}")))
LEAST_EPS = 1e-5
TWO = {"one", "dp2", "cp2", "pp2", "pp2-vpp2", "tp2", "tp2-sp"}
WEIGHTS = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([[1.0]])}
GRADIENT = {"a": torch.tensor([0.6, 0.8]), "b": torch.tensor([[10.0]])}


def list_divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def list_layouts(
    num_processes: int, num_layers: int, is_allowed: Callable[[ParallelConfig], bool]
) -> list[ParallelConfig]:
    """Every allowed layout of the process counts that divide `num_processes`, by their number.

    Of pieces per pipeline stage (vpp), one and the fewest allowed above one; of ranks that share an expert's matrices
    (etp), one and as many as share the other matrices.
    """
    layouts = []
    for size in list_divisors(num_processes):
        for layout in propose(size):
            pieces = [replace(layout, vpp=n) for n in list_divisors(num_layers)[1:]] if layout.pp > 1 else []
            layouts += [*filter(is_allowed, [layout]), *itertools.islice(filter(is_allowed, pieces), 1)]
    return layouts


def propose(num_processes: int) -> Iterator[ParallelConfig]:
    """Layouts of that many processes, whether or not they are allowed."""
    for tp, pp, cp, ep in itertools.product(list_divisors(num_processes), repeat=4):
        for sp, etp in itertools.product((False, True), sorted({1, tp})):
            if tp * pp * cp <= num_processes and ep * etp * pp <= num_processes:
                yield ParallelConfig(num_processes=num_processes, tp=tp, sp=sp, pp=pp, cp=cp, ep=ep, etp=etp)


def is_allowed(config: Config, architecture: Architecture, spec: WorkerSpec, layout: ParallelConfig) -> bool:
    """Whether `megarl train` would take the layout for the role of `spec`."""
    role = spec.role.value
    node = replace(getattr(config, role), parallel=layout)
    problems = itertools.chain(
        check_config(replace(config, **{role: node})),
        check_layout(architecture, layout, f"{role}.parallel"),
        check_role_fields(architecture, replace(spec, parallel=layout)),
    )
    return next(iter(problems), None) is None


def test_four_processes_have_the_mixtures_and_nothing_that_the_model_does_not_divide_into() -> None:
    config = load_config(["model=tiny", "model.random.num_layers=4"])
    models = load_models(config)
    spec, arch = load_specs(config, models)[Role.policy], models.architecture
    layouts = list_layouts(4, 4, lambda layout: is_allowed(config, arch, spec, layout))
    names = {describe_layout(layout) for layout in layouts}
    assert len(names) == len(layouts), "two layouts with one name"
    mixtures = {"pp2-dp2", "tp2-cp2", "tp2-sp-pp2", "tp2-sp-pp2-vpp2", "pp2-cp2", "tp2-sp-cp2", "cp2-dp2", "cp4", "dp4"}
    # Four ranks share two key-value heads by holding each twice.
    assert names > TWO | mixtures | {"pp4", "tp4", "tp4-sp"}
    # Four layers do not make eight pieces, a dense model has no experts.
    assert not any("ep" in name or name == "pp4-vpp2" for name in names)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("role", [Role.policy, Role.critic])
def test_a_role_computes_the_same_under_every_layout(role: Role, tmp_path: Path) -> None:
    config = load_config(OVERRIDES)
    models = load_models(config)
    spec, tokenizer = load_specs(config, models).get(role), load_tokenizer(models.checkpoint)
    if spec is None or spec.optimizer is None:
        pytest.skip(f"{' '.join(OVERRIDES)} trains no {role.value}")
    spec = replace(spec, optimizer=replace(spec.optimizer, eps=max(spec.optimizer.eps, LEAST_EPS)))
    arch = models.critic_architecture if role is Role.critic else models.architecture
    # The embedding of padding may be zero, where the gradient of a norm is enormous.
    ids = torch.tensor(sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids)))
    samples = build_samples(config.train.minibatch_size)
    samples = replace(samples, sequences=replace(samples.sequences, tokens=ids[samples.sequences.tokens % len(ids)]))
    layouts = list_layouts(int(NUM_PROCESSES), arch.num_layers, lambda layout: is_allowed(config, arch, spec, layout))
    specs = {describe_layout(layout): replace(spec, parallel=layout) for layout in layouts}
    assert set(specs) == TWO or "MEGARL_LAYOUTS" in os.environ
    runs, wrong = run_layouts(tmp_path, specs, samples), []
    print(f"\n| | layout | processes | {' | '.join(FLOAT32)} | |", "| --- " * 9 + "|", sep="\n")
    for name, run in runs.items():
        differences = compare_runs(run, runs["one"])
        problems = find_problems(differences, BOUNDS[spec.dtype])
        wrong += [f"{name}: {problem}" for problem in problems]
        cells = [role.value, name, str(specs[name].parallel.num_processes), *map("{:.1e}".format, differences.values())]
        print(f"| {' | '.join([*cells, '; '.join(problems) or 'equal'])} |")
    assert not wrong


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


OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-5, weight_decay=0.1)
ROWS = {
    "dense": ("qwen3", "tp2-sp", None),
    "experts": ("qwen3_moe", "dp2-ep2", None),
    "lora": ("qwen3", "tp2-sp", LoraConfig(3, 12.0)),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    root, specs = tmp_path_factory.mktemp("two"), {}
    for name, (family, own, lora) in ROWS.items():
        write_checkpoint(root / family, family)
        fields = {"lora": lora, "optimizer": OPTIMIZER, "tokens_per_microbatch": 60}
        for key, layout in (("one", "one"), ("two", own)):
            specs[f"{name}-{key}"] = build_spec(Role.policy, root / family, layout, **fields)
    return run_layouts(root / "runs", specs, build_samples())


@pytest.mark.parametrize("name", ROWS)
def test_two_processes_train_what_one_does(name: str, runs: dict[str, Run]) -> None:
    one, two = runs[f"{name}-one"], runs[f"{name}-two"]
    assert find_problems(compare_runs(two, one)) == []
    before, after = two.read("before"), two.read("after")
    assert any(not after[key].equal(before[key]) for key in before)


def test_a_saved_state_goes_on_in_another_layout_and_is_converted_to_what_ranks_export(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "qwen3", "qwen3")
    one, two = (build_spec(Role.policy, tmp_path / "qwen3", layout) for layout in ("one", "tp2-sp"))
    saved = run_specs(tmp_path, {"saved": two}, "update weights:export save:state")["saved"]
    convert(open_source(tmp_path / "state"), tmp_path / "hf")
    loaded = run_specs(tmp_path, {"loaded": one}, "load:state weights:loaded update")["loaded"]
    expected = saved.read("export")
    for found in (read(tmp_path / "hf"), loaded.read("loaded")):
        assert found.keys() == expected.keys()
        assert all(found[key].equal(expected[key]) for key in expected)
    assert loaded.list_metrics("grad_norm")[0] > 0
