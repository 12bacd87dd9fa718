"""Losses, gradients, updates, evaluations and exports of every layout, way and cut into micro-batches equal those of
one process, which are those of transformers, with every term of the losses, sequences of different lengths, tokens of
the environment in them and a failed sample.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_runs import (
    FLOAT32,
    VERBS,
    Run,
    build_conversations,
    build_spec,
    compare_runs,
    find_problems,
    give_experts,
    read,
    read_layout,
    run_layouts,
    run_specs,
)
from tiny_checkpoints import build_samples, padded_reference_logprobs, write_checkpoint

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
from megarl.config.schema.roles import (
    LoraConfig,
    LoraLayers,
    Offload,
    OptimizerConfig,
    Recompute,
    RecomputeMethod,
    Trainable,
)
from megarl.mcore.microbatches import compute_row_costs, pack
from megarl.mcore.spec import Role, WorkerSpec, read_architecture
from megarl.types import TrainingSamples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # Some 170 runs of workers, all before the first test

CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"num_hidden_layers": 4}),
    "qwen2": ("qwen2", {"num_hidden_layers": 4, "tied": True}),
    # Padded to 64 rows: the second of two tensor-parallel ranks has no token at all.
    "small": ("qwen3", {"vocab_size": 30}),
    "qwen3_moe": ("qwen3_moe", {"num_hidden_layers": 4}),
    "unnormalized": ("qwen3_moe", {"norm_topk_prob": False}),
    "glm4_moe": ("glm4_moe", {}),
    # On two stages, of which the first has no expert at all; and stages with different numbers of routers.
    "dense_stage": ("glm4_moe", {"num_hidden_layers": 4, "first_k_dense_replace": 2}),
    "dense_layer": ("glm4_moe", {"num_hidden_layers": 4, "first_k_dense_replace": 1}),
}
ALGO = AlgoConfig(
    entropy_coef=0.01, positive_lm_coef=0.1, dual_clip=1.5, value_clip=0.3, kl=KLConfig(in_loss=True, loss_coef=0.3)
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
EXPERTS = ("tp2-sp", "pp2", "dp2", "dp2-ep2", "tp2-sp-ep2")
LORA, OF_ATTENTION = LoraConfig(3, 12.0), LoraConfig(3, 12.0, [LoraLayers.attention])
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
    "unnormalized": (Role.policy, "unnormalized", {}, ()),
    **{
        f"{checkpoint}_{role.value}": (role, checkpoint, {}, layouts)
        for role, checkpoint, layouts in (
            (Role.policy, "glm4_moe", EXPERTS),
            (Role.critic, "glm4_moe", ("tp2-sp", "dp2-ep2")),
            (Role.policy, "dense_stage", ("pp2", "tp2-sp-ep2")),
            (Role.critic, "dense_stage", ("pp2",)),
        )
    },
    "lora": (Role.policy, "qwen2", {"lora": LORA}, ("tp2", *TWO)),
    "lora_critic": (Role.critic, "qwen3", {"algo": ALGO, "lora": LORA}, TWO),
    "lora_critic_experts": (Role.critic, "qwen3_moe", {"lora": OF_ATTENTION}, ("dp2-ep2", "tp2-sp-ep2", "pp2-dp2-ep2")),
    "lora_experts": (Role.policy, "qwen3_moe", {"lora": OF_ATTENTION}, ("dp2-ep2", "tp2-sp-ep2")),
    "replay": (Role.policy, "qwen3_moe", {"router_replay": True}, ("dp2-ep2", "cp2-ep2", "tp2-sp-ep2", "pp2-vpp2")),
    "replay_dense": (Role.policy, "dense_layer", {"router_replay": True}, ("pp2-vpp2",)),
}
OVERLAP = replace(OPTIMIZER, overlap_grad_reduce=True, overlap_param_gather=True)
RECOMPUTED: dict[str, dict[str, Any]] = {
    "selective": {"recompute": Recompute.selective},
    "modules": {"recompute": Recompute.selective, "megatron": {"recompute_modules": ["core_attn", "mlp"]}},
    "pairs": {"recompute": Recompute.full, "recompute_num_layers": 2},
    "block": {"recompute": Recompute.full, "recompute_method": RecomputeMethod.block, "recompute_num_layers": 1},
}
WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "overlap": ("policy", "pp2-vpp2-dp2", {"optimizer": OVERLAP}),
    "uneven": ("policy", "pp2", {"megatron": {"num_layers_in_first_pipeline_stage": 1}}),
    "partly_recomputed": ("critic_partly", "one", {"recompute": Recompute.full}),
    "partly_offloaded": ("critic_partly", "one", {"offload": Offload.all}),
    **{
        f"{row}_{name}{layout}": (row, layout, fields)
        for name, fields in RECOMPUTED.items()
        for row, layout in (("policy", "tp2-sp"), ("critic", "one"))
    },
    # The router meets each micro-batch again, when later ones have passed it.
    "experts_recomputed": ("experts", "pp2", {"recompute": Recompute.full}),
    **{
        f"{row}_recomputed_{layout}": (row, layout, {"recompute": Recompute.full})
        for row in ("replay", "replay_dense")
        for layout in ("pp2", "pp2-vpp2", "cp2")
    },
    "lora_recomputed": ("lora", "one", {"recompute": Recompute.full}),
    "lora_critic_recomputed": ("lora_critic", "one", {"recompute": Recompute.full}),
    "lora_critic_offloaded": ("lora_critic", "one", {"offload": Offload.all}),
}
CUTS = {f"{row}_cut{number}": (row, number) for row in ("policy", "critic", "experts", "replay") for number in (2, 8)}
SAMPLES = build_conversations(seed=0)
REPLAYED = replace(SAMPLES, sequences=give_experts(SAMPLES.sequences))
NAMES = [
    *((f"{row}-{layout}", row) for row, (_, _, _, layouts) in ROWS.items() for layout in layouts),
    *((name, row) for name, (row, *_) in (WAYS | CUTS).items()),
]


def find_budget(spec: WorkerSpec, num_microbatches: int) -> int:
    """Tokens of a micro-batch that cut the samples into so many for one rank."""
    lengths = SAMPLES.sequences.lengths.tolist()
    costs = compute_row_costs(read_architecture(Path(spec.checkpoint)), SAMPLES.sequences, spec.role is Role.critic)
    return next(n for n in range(sum(lengths), 0, -1) if len(pack(lengths, n, 1, costs)[0]) == num_microbatches)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def models(root: Path) -> dict[str, Any]:
    """Of transformers, by checkpoint."""
    return {name: write_checkpoint(root / name, family, **fields) for name, (family, fields) in CHECKPOINTS.items()}


@pytest.fixture(scope="module")
def runs(root: Path, models: dict[str, Any]) -> dict[str, Run]:
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
    specs["reversed"] = (specs["policy"], {"verbs": VERBS.replace("update", "reversed")})
    replayed = {"samples": REPLAYED, "sequences": (REPLAYED.sequences,)}
    given = {name: (spec, replayed) if name.startswith("replay") else spec for name, spec in specs.items()}
    return run_layouts(root / "runs", given, SAMPLES, f"scores {VERBS}")


def assert_equal(run: Run, one: Run, bounds: Mapping[str, float] = FLOAT32) -> None:
    assert find_problems(compare_runs(run, one), bounds) == []
    for found, expected in zip(run.metrics, one.metrics, strict=True):
        assert found.keys() == expected.keys()
        # How much padding there is depends on the cut.
        kept = {key for key in found if not key.endswith(("real_tokens_frac", "_tflop_sum"))}
        assert {key: found[key] for key in kept} == pytest.approx(
            {key: expected[key] for key in kept}, rel=2e-5, abs=2e-6
        )


def trains(row: str, tensor: str) -> bool:
    """Whether training a role of this row moves a tensor of its checkpoint."""
    if row == "experts_alone":
        return ".mlp.experts." in tensor or tensor == "score.weight"
    if row == "critic_partly":
        return ".mlp." in tensor or tensor == "score.weight"
    if row.startswith("lora"):
        kinds = ("q_proj", "k_proj", "v_proj", "o_proj") + (() if row.endswith("experts") else ("mlp",))
        kinds += ("score",) if "critic" in row else ()
        return tensor.endswith(".weight") and any(kind in tensor for kind in kinds)
    return not tensor.endswith("e_score_correction_bias")


@pytest.mark.parametrize(("name", "row"), [*NAMES, ("reversed", "policy")])
def test_a_layout_a_way_a_cut_and_another_order_compute_what_one_process_does(
    name: str, row: str, runs: dict[str, Run]
) -> None:
    assert_equal(runs[name], runs[row])


@pytest.mark.parametrize(("name", "row"), [*((row, row) for row in ROWS), *NAMES])
def test_a_role_exports_what_it_loaded_and_moves_what_is_trained(
    name: str, row: str, root: Path, runs: dict[str, Run]
) -> None:
    before, after, source = runs[name].read("before"), runs[name].read("after"), read(Path(runs[name].spec.checkpoint))
    if ROWS[row][0] is Role.critic:
        source.pop("lm_head.weight", None)
    assert before.keys() == after.keys() == source.keys()
    assert all(torch.equal(before[key], source[key]) for key in source)
    assert {key for key in after if not torch.equal(before[key], after[key])} == {
        key for key in after if trains(row, key)
    }


@pytest.mark.parametrize(("name", "row"), [*((row, row) for row in ROWS), *NAMES])
def test_logprobs_are_those_of_transformers(name: str, row: str, models: dict[str, Any], runs: dict[str, Run]) -> None:
    role, checkpoint, _, _ = ROWS[row]
    if role is Role.critic or row.startswith("replay"):
        pytest.skip("a critic has none; test_one_process.py has those with given experts")
    model = models[checkpoint]
    sequences = replace(SAMPLES.sequences, tokens=SAMPLES.sequences.tokens % model.config.vocab_size)
    expected = padded_reference_logprobs(model, sequences, 0.8)
    torch.testing.assert_close(runs[name]["scores"][0], expected, rtol=0, atol=1e-5)


def test_every_term_of_the_losses_is_on(runs: dict[str, Run]) -> None:
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


def test_where_one_rank_has_nothing_to_learn_from_or_no_row_all_is_that_of_one_process(
    root: Path, models: dict[str, Any], tmp_path: Path
) -> None:
    given = {"half": keep_half_a_row(), "one row": SAMPLES.select(torch.tensor([0]))}
    specs = {
        f"{kind}-{role.value}-{layout}": (
            build_spec(role, root / "qwen3", layout, algo=ALGO, optimizer=OPTIMIZER),
            {"samples": samples, "sequences": (samples.sequences,)},
        )
        for kind, samples in given.items()
        for role in (Role.policy, Role.critic)
        for layout in ("one", "dp2", "cp2")
    }
    found = run_layouts(tmp_path, specs, SAMPLES)
    for name, run in found.items():
        one = found[f"{name.rpartition('-')[0]}-one"]
        assert one.list_metrics("grad_norm")[0] > 0
        # Of few tokens, whose losses nearly cancel.
        assert_equal(run, one, FLOAT32 | {"loss": 3e-6})


LOADS: dict[str, tuple[Role, str, dict[str, Any], str, tuple[str, ...]]] = {
    "policy": (Role.policy, "qwen3", {}, "one", TWO),
    "critic": (Role.critic, "qwen3", PARTLY, "one", ("tp2-sp", "pp2", "dp2")),
    "experts": (Role.policy, "qwen3_moe", {}, "dp2-ep2", ("one", "tp2-sp-ep2", "tp2-sp-etp2")),
    "lora": (Role.policy, "qwen2", {"lora": LORA}, "tp2-sp", ("tp2", "pp2", "dp2", "cp2")),
    "lora experts": (Role.policy, "qwen3_moe", {"lora": OF_ATTENTION}, "dp2-ep2", ("tp2-sp-ep2",)),
    "lora critic": (Role.critic, "qwen3", {"lora": LORA}, "tp2-sp", ("one", "pp2", "dp2")),
}
"""Role, checkpoint, fields, the layout that saves and others that load"""


def test_loading_continues_identically_also_under_other_layouts(
    root: Path, models: dict[str, Any], tmp_path: Path
) -> None:
    """Bit by bit in the layout that saved, up to rounding in others. A step is made while the files are written."""
    saving, loading = {}, {}
    for number, (case, (role, checkpoint, fields, saved_in, layouts)) in enumerate(LOADS.items()):
        specs = {name: build_spec(role, root / checkpoint, name, **fields) for name in (saved_in, *layouts)}
        verbs = f"update:2 checksum begin:state{number} update finish:state{number} weights:after"
        saving[case] = (specs[saved_in], {"verbs": verbs})
        verbs = f"checksum load:state{number} checksum update weights:after"
        loading |= {f"{case}-{name}": (spec, {"verbs": verbs}) for name, spec in specs.items()}
    saved_runs, found = run_specs(tmp_path, saving), run_specs(tmp_path, loading)
    for name, run in found.items():
        case, _, layout = name.partition("-")
        saved = saved_runs[case]
        is_same = layout == LOADS[case][3]
        if is_same:
            fresh, loaded = run["checksum"]
            assert fresh != saved["checksum"][0] == loaded, name
            assert run.metrics == saved.metrics[2:], name
        after = run.read("after")
        for key, tensor in saved.read("after").items():
            tolerance = 0.0 if is_same else 2e-6
            torch.testing.assert_close(after[key], tensor, rtol=0, atol=tolerance, msg=f"{name} {key}")


OF_LOSSES = {
    "grpo": AlgoConfig(clip_low=0.2, clip_high=0.28, entropy_coef=0.01),
    "gspo": AlgoConfig(surrogate="gspo"),
    "tis": AlgoConfig(mismatch=MismatchConfig(correction=MismatchCorrection.tis)),
}
"""Of GRPO and PPO (the same: advantages are given), of a ratio per response, and with a correction"""


def test_an_update_that_computes_old_logprobs_itself_is_that_which_is_given_those_of_a_pass_in_every_layout(
    root: Path, models: dict[str, Any], tmp_path: Path
) -> None:
    rows = [(algo, "one", tokens) for algo in OF_LOSSES for tokens in (10_000, 60)]
    rows += [("grpo", layout, 60) for layout in TWO]
    specs = {
        f"{algo}-{layout}-{tokens}": build_spec(
            Role.policy, root / "qwen3", layout, algo=OF_LOSSES[algo], tokens_per_microbatch=tokens
        )
        for algo, layout, tokens in rows
    }
    without, verbs = replace(build_samples(), old_logprobs=None), "gradient:gradient reversed"
    owns = run_specs(tmp_path / "own", specs, f"scores {verbs} updated", samples=without)
    passes = {name: run["scores"][0] for name, run in owns.items()}
    pairs = {x: (spec, {"samples": replace(without, old_logprobs=passes[x])}) for x, spec in specs.items()}
    givens = run_specs(tmp_path / "given", pairs, verbs)
    for name, own in owns.items():
        given = givens[name]
        torch.testing.assert_close(own["updated"][0], passes[name], atol=1e-5, rtol=1e-5, msg=name)
        gradient = own.read("gradient")
        for key, expected in given.read("gradient").items():
            torch.testing.assert_close(gradient[key], expected, atol=1e-6, rtol=1e-4, msg=f"{name} {key}")
        assert own.metrics[0] == pytest.approx(given.metrics[0], rel=1e-4, abs=1e-5)
        assert own.list_metrics("ratio_mean")[0] == pytest.approx(1.0, abs=1e-6)
