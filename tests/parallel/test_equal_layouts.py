"""Loss, gradients and updates of every layout and every cut into micro-batches equal those of one process, with every
term of the losses, sequences of different lengths, tokens of the environment in them and a failed sample.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from check_layouts import LayoutRun, compare_runs, describe_layout, find_problems, run_layouts
from layout_runs import build_conversations, build_spec
from tiny_checkpoints import write_checkpoint

from megarl.config.schema.algo import (
    AlgoConfig,
    KLConfig,
    LossAggMode,
    MismatchConfig,
    MismatchCorrection,
    RatioLevel,
    ToprConfig,
)
from megarl.config.schema.roles import OptimizerConfig, ParallelConfig
from megarl.mcore.microbatches import compute_row_costs, pack
from megarl.mcore.spec import Role, WorkerSpec, read_architecture
from megarl.types import TrainingSamples

pytestmark = pytest.mark.slow

ALGO = AlgoConfig(
    entropy_coef=0.01,
    positive_lm_coef=0.1,
    dual_clip=1.5,
    value_clip=0.3,
    kl=KLConfig(in_loss=True, loss_coef=0.3),
)
# What is computed over a whole response, of which context parallelism leaves each rank a part.
WHOLE_RESPONSES = replace(
    ALGO,
    loss_agg_mode=LossAggMode["seq-mean-token-mean"],
    topr=ToprConfig(positive_loss_coef=0.2, negative_loss_coef=0.3),
    mismatch=MismatchConfig(correction=MismatchCorrection.tis, level=RatioLevel.geometric),
)
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-5, weight_decay=0.1)
OVERLAP = replace(OPTIMIZER, overlap_grad_reduce=True, overlap_param_gather=True)
LAYOUTS = [
    ParallelConfig(num_processes=2, tp=2),
    ParallelConfig(num_processes=2, tp=2, sp=True),
    ParallelConfig(num_processes=2, pp=2),
    ParallelConfig(num_processes=2, pp=2, vpp=2),
    ParallelConfig(num_processes=2),
    ParallelConfig(num_processes=2, cp=2),
    ParallelConfig(num_processes=4, tp=2, pp=2, sp=True),
    ParallelConfig(num_processes=4, tp=2, cp=2, sp=True),
    ParallelConfig(num_processes=4, pp=2),
]
# Further ones, of the policy alone: more ranks than key-value heads; pieces of a pipeline with everything else.
MIXTURES = [
    ParallelConfig(num_processes=4, tp=4),
    ParallelConfig(num_processes=4, pp=2, vpp=2, cp=2),
    ParallelConfig(num_processes=4, tp=2, sp=True, pp=2, vpp=2),
    ParallelConfig(num_processes=4),
    ParallelConfig(num_processes=4, cp=4),
    ParallelConfig(num_processes=4, cp=2),
    ParallelConfig(num_processes=4, pp=4),
    ParallelConfig(num_processes=4, pp=2, cp=2),
    ParallelConfig(num_processes=4, tp=2, sp=True),
]
CUTS = (2, 4, 8)
ROLES = {
    # name -> role, family, tied embeddings, algorithm
    "policy": (Role.policy, "qwen3", False, ALGO),
    "policy-tied": (Role.policy, "qwen2", True, WHOLE_RESPONSES),
    "critic": (Role.critic, "qwen3", False, ALGO),
}
SAMPLES = build_conversations(seed=0)


def find_budget(spec: WorkerSpec, num_microbatches: int) -> int:
    """Tokens of a micro-batch that cut the samples into so many for one rank."""
    lengths = SAMPLES.sequences.lengths.tolist()
    arch = read_architecture(Path(spec.checkpoint))
    costs = compute_row_costs(arch, SAMPLES.sequences, with_value_head=spec.role is Role.critic)
    return next(n for n in range(sum(lengths), 0, -1) if len(pack(lengths, n, 1, costs)[0]) == num_microbatches)


def change(spec: WorkerSpec, num_microbatches: int, **changes: Any) -> WorkerSpec:
    return replace(spec, tokens_per_microbatch=find_budget(spec, num_microbatches), **changes)


def build_specs(directory: Path) -> dict[str, WorkerSpec]:
    specs = {}
    for name, (role, family, tied, algo) in ROLES.items():
        path = directory / f"{family}-{tied}"
        if not path.exists():
            write_checkpoint(path, family, tied=tied, num_hidden_layers=4)
        one = build_spec(role, path, algo=algo, optimizer=OPTIMIZER, parallel=ParallelConfig())
        specs[name] = one
        specs |= {f"{name}-{describe_layout(layout)}": change(one, 4, parallel=layout) for layout in LAYOUTS}
        if not tied:
            specs |= {f"{name}-cut{cut}": change(one, cut) for cut in CUTS}
    one, pipeline = specs["policy"], ParallelConfig(num_processes=2, pp=2)
    # Three micro-batches: an interleaved schedule of two stages is given an empty fourth.
    specs |= {f"policy-{describe_layout(layout)}": change(one, 3, parallel=layout) for layout in MIXTURES}
    interleaved = replace(pipeline, num_processes=4, vpp=2)
    specs["policy-overlap"] = change(one, 4, parallel=interleaved, optimizer=OVERLAP)
    specs["policy-uneven"] = change(one, 4, parallel=pipeline, megatron={"num_layers_in_first_pipeline_stage": 1})
    return specs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LayoutRun]:
    directory = tmp_path_factory.mktemp("layouts")
    return run_layouts(build_specs(directory), SAMPLES, 3, directory / "runs")


def assert_equal(runs: dict[str, LayoutRun], role: str, name: str) -> None:
    assert find_problems(compare_runs(runs[f"{role}-{name}"], runs[role])) == []


@pytest.mark.parametrize("layout", [describe_layout(layout) for layout in LAYOUTS])
@pytest.mark.parametrize("role", list(ROLES))
def test_a_layout_computes_what_one_process_does(role: str, layout: str, runs: dict[str, LayoutRun]) -> None:
    assert_equal(runs, role, layout)


@pytest.mark.parametrize("name", [*(describe_layout(layout) for layout in MIXTURES), "overlap", "uneven"])
def test_a_mixture_computes_what_one_process_does(name: str, runs: dict[str, LayoutRun]) -> None:
    assert_equal(runs, "policy", name)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_a_cut_into_microbatches_computes_what_one_does(role: str, cut: int, runs: dict[str, LayoutRun]) -> None:
    assert_equal(runs, role, f"cut{cut}")


def test_every_term_of_the_losses_is_on(runs: dict[str, LayoutRun]) -> None:
    policy, critic = runs["policy"].metrics[0], runs["critic"].metrics[0]
    for term in ("kl_loss", "entropy", "positive_lm", "clip_frac", "dual_clip_frac"):
        assert policy[f"policy/{term}"] > 1e-3, term
    assert critic["critic/clip_frac"] > 1e-3


def keep_half_a_row() -> TrainingSamples:
    """Five rows, which two ranks do not divide evenly, and of which half of row 0 alone teaches: 1 and 2 have failed,
    the rest is too stale for both roles.
    """
    samples = SAMPLES.select(torch.arange(5))
    rows, even = torch.arange(5)[:, None], torch.arange(samples.mask.shape[1]) % 2 == 0
    mask = samples.mask & (rows != 1) & (rows != 2)
    return replace(samples, mask=mask, loss_mask=mask & (rows == 0) & even, critic_mask=mask & (rows == 0) & even)


def test_where_one_rank_has_nothing_to_learn_from_all_metrics_are_those_of_one_process(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "qwen3", num_hidden_layers=4)
    specs = {
        f"{role.value}-{describe_layout(parallel)}": build_spec(
            role, tmp_path / "qwen3", algo=ALGO, optimizer=OPTIMIZER, parallel=parallel
        )
        for role in (Role.policy, Role.critic)
        for parallel in (ParallelConfig(), *LAYOUTS[4:6])
    }
    found = run_layouts(specs, keep_half_a_row(), 2, tmp_path / "runs")
    for name, run in found.items():
        one = found[f"{run.role.value}-one"]
        assert one.list_metrics("grad_norm")[0] > 0
        assert find_problems(compare_runs(run, one)) == [], name
        for own, expected in zip(run.metrics, one.metrics, strict=True):
            assert own.keys() == expected.keys()
            kept = {key for key in own if not key.endswith(("real_tokens_frac", "_tflop_sum"))}
            assert {key: own[key] for key in kept} == pytest.approx(
                {key: expected[key] for key in kept}, rel=1e-5, abs=1e-6
            ), name
