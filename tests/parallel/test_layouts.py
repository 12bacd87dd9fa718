"""Losses, gradients, updates and evaluations of every layout and every cut into micro-batches equal those of one
process, with every term of the losses, sequences of different lengths, tokens of the environment in them and a failed
sample.
"""

import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from check_layouts import LayoutRun, compare_runs, find_problems, run_layouts
from layout_runs import build_conversations, build_spec, launch_each, load_and_train, train_and_save
from tiny_checkpoints import write_checkpoint

from megarl.config.schema.algo import (
    AlgoConfig,
    KLConfig,
    KLEstimator,
    LossAggMode,
    MismatchConfig,
    MismatchCorrection,
    RatioLevel,
    ToprConfig,
)
from megarl.config.schema.roles import Offload, OptimizerConfig, ParallelConfig, Recompute, Trainable
from megarl.mcore.microbatches import compute_row_costs, pack
from megarl.mcore.spec import Role, WorkerSpec, read_architecture
from megarl.types import TrainingSamples

pytestmark = pytest.mark.slow

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 4},
    "qwen2": {"num_hidden_layers": 4, "tied": True},
    # Padded to 64 rows: the second of two tensor-parallel ranks has no token at all.
    "small": {"vocab_size": 30},
    "qwen3_moe": {"num_hidden_layers": 4},
}
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
FULL_KL = {"algo": AlgoConfig(kl=KLConfig(in_loss=True, loss_estimator=KLEstimator.full, loss_coef=0.3))}
PARTLY = {"algo": ALGO, "trainable": Trainable.mlp, "value_range": (-1.0, 2.0)}
"""SAO's frozen attention and BPCO's bounded values"""
TERMS = {"algo": ALGO, "megatron": {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}}
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-5, weight_decay=0.1)
TWO = ("tp2-sp", "pp2", "pp2-vpp2", "dp2", "cp2")
LAYOUTS = ("tp2", *TWO, "tp2-sp-pp2", "tp2-sp-cp2", "pp2-dp2")
# More ranks than key-value heads; pieces of a pipeline with everything else.
MIXTURES = ("tp4", "pp2-vpp2-cp2", "tp2-sp-pp2-vpp2", "dp4", "cp4", "cp2-dp2", "pp4", "pp2-cp2", "tp2-sp-dp2")
# Experts split as the attention is, kept whole on each rank, and each on one of the ranks.
OF_EXPERTS = (
    *("dp2-ep2", "cp2-ep2", "tp2-sp-etp2", "tp2-sp", "tp2-sp-ep2"),
    *("pp2-dp2-ep2", "tp2-sp-dp2-ep2-etp2", "tp2-sp-pp2-ep2"),
)
ROWS: dict[str, tuple[Role, str, dict[str, Any], tuple[str, ...]]] = {
    "policy": (Role.policy, "qwen3", {"algo": ALGO}, (*LAYOUTS, *MIXTURES)),
    "policy_tied": (Role.policy, "qwen2", {"algo": WHOLE_RESPONSES}, LAYOUTS),
    "critic": (Role.critic, "qwen3", {"algo": ALGO}, LAYOUTS),
    "critic_partly": (Role.critic, "qwen3", PARTLY, TWO),
    "full_kl": (Role.policy, "qwen3", FULL_KL, ("tp2", "tp2-sp", "dp2", "cp2")),
    "full_kl_small": (Role.policy, "small", FULL_KL, ("tp2",)),
    "experts": (Role.policy, "qwen3_moe", TERMS, OF_EXPERTS),
    "experts_critic": (Role.critic, "qwen3_moe", TERMS, ("dp2-ep2", "tp2-sp-ep2", "pp2-dp2-ep2")),
    "experts_alone": (Role.critic, "qwen3_moe", TERMS | {"trainable": Trainable.mlp}, ("dp2-ep2",)),
}
OVERLAP = replace(OPTIMIZER, overlap_grad_reduce=True, overlap_param_gather=True)
WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "overlap": ("policy", "pp2-vpp2-dp2", {"optimizer": OVERLAP}),
    "uneven": ("policy", "pp2", {"megatron": {"num_layers_in_first_pipeline_stage": 1}}),
    "partly_recomputed": ("critic_partly", "one", {"recompute": Recompute.full}),
    "partly_offloaded": ("critic_partly", "one", {"offload": Offload.all}),
    # The router meets each micro-batch again, when later ones have passed it.
    "experts_recomputed": ("experts", "pp2", {"recompute": Recompute.full}),
}
CUTS = {f"{row}_cut{number}": (row, number) for row in ("policy", "critic", "experts") for number in (2, 4, 8)}
SAMPLES = build_conversations(seed=0)


def read_layout(name: str) -> ParallelConfig:
    """What `describe_layout` calls so."""
    found = dict(re.fullmatch(r"([a-z]+)(\d*)", part).groups() for part in name.split("-"))  # type: ignore[union-attr]
    sizes = {key: int(size) for key, size in found.items() if size}
    number = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1) * sizes.pop("dp", 1)
    return ParallelConfig(num_processes=number, sp="sp" in found, **sizes)


def find_budget(spec: WorkerSpec, num_microbatches: int) -> int:
    """Tokens of a micro-batch that cut the samples into so many for one rank."""
    lengths = SAMPLES.sequences.lengths.tolist()
    costs = compute_row_costs(read_architecture(Path(spec.checkpoint)), SAMPLES.sequences, spec.role is Role.critic)
    return next(n for n in range(sum(lengths), 0, -1) if len(pack(lengths, n, 1, costs)[0]) == num_microbatches)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layouts")
    for name, fields in CHECKPOINTS.items():
        write_checkpoint(root / name, name if name != "small" else "qwen3", **fields)
    return root


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, LayoutRun]:
    specs = {}
    for row, (role, checkpoint, fields, layouts) in ROWS.items():
        one = build_spec(role, root / checkpoint, optimizer=OPTIMIZER, **fields)
        specs[row] = one
        for layout in layouts:
            # Three micro-batches: an interleaved schedule of two stages is given an empty fourth.
            budget = find_budget(one, 3 if layout in MIXTURES else 4)
            specs[f"{row}-{layout}"] = replace(one, parallel=read_layout(layout), tokens_per_microbatch=budget)
    for name, (row, layout, fields) in WAYS.items():
        one = specs[row]
        specs[name] = replace(one, parallel=read_layout(layout), tokens_per_microbatch=find_budget(one, 4), **fields)
    for name, (row, number) in CUTS.items():
        specs[name] = replace(specs[row], tokens_per_microbatch=find_budget(specs[row], number))
    return run_layouts(specs, SAMPLES, 3, root / "runs")


def assert_equal(run: LayoutRun, one: LayoutRun) -> None:
    assert find_problems(compare_runs(run, one)) == []
    for found, expected in zip(run.metrics, one.metrics, strict=True):
        assert found.keys() == expected.keys()
        # How much padding there is depends on the cut.
        kept = {key for key in found if not key.endswith(("real_tokens_frac", "_tflop_sum"))}
        assert {key: found[key] for key in kept} == pytest.approx(
            {key: expected[key] for key in kept}, rel=2e-5, abs=2e-6
        )


@pytest.mark.parametrize(
    ("name", "row"),
    [
        *((f"{row}-{layout}", row) for row, (_, _, _, layouts) in ROWS.items() for layout in layouts),
        *((name, row) for name, (row, *_) in (WAYS | CUTS).items()),
    ],
)
def test_a_layout_a_way_and_a_cut_compute_what_one_process_does(
    name: str, row: str, runs: dict[str, LayoutRun]
) -> None:
    assert_equal(runs[name], runs[row])
    if row in ("critic_partly", "experts_alone"):
        before, after = runs[name].read("before"), runs[name].read("after")
        moved = {key for key in after if not torch.equal(before[key], after[key])}
        kind = ".mlp.experts." if row == "experts_alone" else ".mlp."
        assert moved == {key for key in after if kind in key or key == "score.weight"}


def test_every_term_of_the_losses_is_on(runs: dict[str, LayoutRun]) -> None:
    policy, critic = runs["policy"].metrics[0], runs["critic"].metrics[0]
    for term in ("kl_loss", "entropy", "positive_lm", "clip_frac", "dual_clip_frac"):
        assert policy[f"policy/{term}"] > 1e-3, term
    assert critic["critic/clip_frac"] > 1e-3
    assert runs["full_kl"].metrics[2]["policy/kl_loss"] > 0


def keep_half_a_row() -> TrainingSamples:
    """Five rows, which two ranks do not divide evenly, and of which half of row 0 alone teaches: 1 and 2 have failed,
    the rest is too stale for both roles.
    """
    samples = SAMPLES.select(torch.arange(5))
    rows, even = torch.arange(5)[:, None], torch.arange(samples.mask.shape[1]) % 2 == 0
    mask = samples.mask & (rows != 1) & (rows != 2)
    return replace(samples, mask=mask, loss_mask=mask & (rows == 0) & even, critic_mask=mask & (rows == 0) & even)


@pytest.mark.parametrize("samples", [keep_half_a_row(), SAMPLES.select(torch.tensor([0]))], ids=["half", "one row"])
def test_where_one_rank_has_nothing_to_learn_from_or_no_row_all_is_that_of_one_process(
    samples: TrainingSamples, root: Path, tmp_path: Path
) -> None:
    specs = {
        f"{role.value}-{layout}": build_spec(
            role, root / "qwen3", algo=ALGO, optimizer=OPTIMIZER, parallel=read_layout(layout)
        )
        for role in (Role.policy, Role.critic)
        for layout in ("one", "dp2", "cp2")
    }
    found = run_layouts(specs, samples, 2, tmp_path)
    for run in found.values():
        one = found[f"{run.role.value}-one"]
        assert one.list_metrics("grad_norm")[0] > 0
        assert_equal(run, one)


@pytest.mark.parametrize(
    ("role", "checkpoint", "fields", "saved_in", "layouts"),
    [
        (Role.policy, "qwen3", {}, "one", TWO),
        (Role.critic, "qwen3", PARTLY, "one", ("tp2-sp", "pp2", "dp2")),
        (Role.policy, "qwen3_moe", {}, "dp2-ep2", ("one", "tp2-sp-ep2", "tp2-sp-etp2")),
    ],
)
def test_loading_continues_identically_also_under_other_layouts(
    role: Role, checkpoint: str, fields: dict[str, Any], saved_in: str, layouts: tuple[str, ...], root: Path
) -> None:
    """Bit by bit in the layout that saved, up to rounding in others."""

    def build(name: str) -> WorkerSpec:
        return build_spec(role, root / checkpoint, parallel=read_layout(name), **fields)

    specs = {layout: build(layout) for layout in (saved_in, *layouts)}
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        size = specs[saved_in].parallel.num_processes
        (saved,) = launch_each(size, train_and_save, {"saved": specs[saved_in]}, scratch=scratch).values()
        for size in (1, 2):
            own = {name: spec for name, spec in specs.items() if spec.parallel.num_processes == size}
            found |= launch_each(size, load_and_train, own, scratch=scratch)
    same = found[saved_in]
    assert same["fresh"] != saved["checksum"] == same["checksum"]
    assert same["metrics"] == saved["metrics"]
    for name, run in found.items():
        for key, tensor in saved["after"]["weights"].items():
            tolerance = 0.0 if name == saved_in else 2e-6
            torch.testing.assert_close(
                run["after"]["weights"][key], tensor, rtol=0, atol=tolerance, msg=f"{name} {key}"
            )
