"""A mixture of experts in every layout against one process and against transformers, with load-balancing terms."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from check_layouts import LayoutRun, compare_runs, find_problems, run_layouts
from layout_runs import build_spec, evaluate_once, launch_each, load_and_train, train_and_save
from tiny_checkpoints import build_samples, build_sequences, padded_reference_logprobs, write_checkpoint

from megarl.config.schema.roles import OptimizerConfig, ParallelConfig, Recompute, Trainable
from megarl.mcore.spec import Role

pytestmark = pytest.mark.slow

AUX_COEF, Z_COEF = 0.1, 0.01
TERMS = {"moe_aux_loss_coeff": AUX_COEF, "moe_z_loss_coeff": Z_COEF}
NUM_EXPERTS, TOP_K = 4, 2
LAYOUTS = {
    "dp2_ep2": ParallelConfig(num_processes=2, ep=2),
    "cp2_ep2": ParallelConfig(num_processes=2, cp=2, ep=2),
    # Experts split as the attention is, kept whole on each rank, and each on one of the ranks.
    "tp2_sp_etp2": ParallelConfig(num_processes=2, tp=2, sp=True, etp=2),
    "tp2_sp_etp1": ParallelConfig(num_processes=2, tp=2, sp=True),
    "tp2_sp_ep2": ParallelConfig(num_processes=2, tp=2, sp=True, ep=2),
    "pp2_dp2_ep2": ParallelConfig(num_processes=4, pp=2, ep=2),
    "tp2_sp_dp2_ep2_etp2": ParallelConfig(num_processes=4, tp=2, sp=True, ep=2, etp=2),
    "tp2_sp_pp2_ep2": ParallelConfig(num_processes=4, tp=2, sp=True, pp=2, ep=2),
}
MLP_LAYOUTS = ("dp2_ep2",)
"""With the experts alone trained"""
CUTS = {"cut_1": 1, "cut_60": 60}
"""tokens_per_microbatch"""
# The router meets each micro-batch again, when later ones have passed it.
RECOMPUTED = "pp2_recompute"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("experts") / "qwen3_moe"
    model = write_checkpoint(path, "qwen3_moe")
    # The grouped product of experts has no float64.
    model.set_experts_implementation("eager")
    return path, model.double()


@pytest.fixture(scope="module")
def runs(start: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, LayoutRun]:
    optimizer = OptimizerConfig(lr=1e-2, eps=1e-5, weight_decay=0.1, clip_grad=1e9)

    def build(role: Role, **changes: Any) -> Any:
        return build_spec(role, start[0], optimizer=optimizer, **{"megatron": TERMS, **changes})

    specs = {"one": build(Role.policy), "one_without_terms": build(Role.policy, megatron={})}
    specs |= {name: build(Role.policy, tokens_per_microbatch=tokens) for name, tokens in CUTS.items()}
    specs |= {name: build(Role.policy, parallel=x, tokens_per_microbatch=60) for name, x in LAYOUTS.items()}
    pp2 = ParallelConfig(num_processes=2, pp=2)
    specs[RECOMPUTED] = build(Role.policy, parallel=pp2, tokens_per_microbatch=60, recompute=Recompute.full)
    specs["critic-one"] = build(Role.critic)
    for name in ("dp2_ep2", "tp2_sp_ep2", "pp2_dp2_ep2"):
        specs[f"critic-{name}"] = build(Role.critic, parallel=LAYOUTS[name], tokens_per_microbatch=60)
    specs["mlp-one"] = build(Role.critic, trainable=Trainable.mlp)
    for name in MLP_LAYOUTS:
        fields = {"parallel": LAYOUTS[name], "tokens_per_microbatch": 60, "trainable": Trainable.mlp}
        specs[f"mlp-{name}"] = build(Role.critic, **fields)
    return run_layouts(specs, build_samples(), 3, tmp_path_factory.mktemp("runs"))


def compute_terms(model: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
    """By transformers in float64, one sequence at a time, means over both layers: the load-balancing term, the z-loss
    term, and the busiest expert's tokens over those of an average one.
    """
    sequences = build_samples().sequences
    rows = sequences.tokens.split(sequences.lengths.tolist())
    balance, z, tokens = torch.zeros(()), torch.zeros(()), torch.zeros(2, NUM_EXPERTS, dtype=torch.float64)
    for row in rows:
        for layer, logits in enumerate(model(row[None], output_router_logits=True).router_logits):
            logits = logits.reshape(-1, NUM_EXPERTS)
            probs = logits.softmax(-1)
            chosen = torch.nn.functional.one_hot(logits.topk(TOP_K).indices, NUM_EXPERTS).sum(1)
            shares = chosen.double().mean(0) / TOP_K
            balance = balance + NUM_EXPERTS * (shares * probs.mean(0)).sum() / len(rows)
            z = z + logits.logsumexp(-1).square().sum() / len(sequences.tokens)
            tokens[layer] += chosen.sum(0)
    return balance / 2, z / 2, (tokens.amax(1) / tokens.mean(1)).mean().item()


@pytest.mark.parametrize("name", [*CUTS, *LAYOUTS, RECOMPUTED])
def test_every_layout_and_cut_trains_a_mixture_of_experts_alike(name: str, runs: dict[str, LayoutRun]) -> None:
    assert find_problems(compare_runs(runs[name], runs["one"])) == []


@pytest.mark.parametrize("name", ["dp2_ep2", "tp2_sp_ep2", "pp2_dp2_ep2"])
def test_every_layout_trains_a_critic_with_experts_alike(name: str, runs: dict[str, LayoutRun]) -> None:
    assert find_problems(compare_runs(runs[f"critic-{name}"], runs["critic-one"])) == []


@pytest.mark.parametrize("name", MLP_LAYOUTS)
def test_every_layout_trains_the_experts_of_a_critic_alone_alike(name: str, runs: dict[str, LayoutRun]) -> None:
    run = runs[f"mlp-{name}"]
    assert find_problems(compare_runs(run, runs["mlp-one"])) == []
    before, after = run.read("before"), run.read("after")
    moved = {key for key in after if not torch.equal(before[key], after[key])}
    assert moved == {key for key in after if is_expert_or_head(key)}


def test_the_gradient_of_trained_weights_is_that_of_a_critic_which_is_trained_whole(runs: dict[str, LayoutRun]) -> None:
    whole, partly = runs["critic-one"].read("gradient"), runs["mlp-one"].read("gradient")
    trained = {name: tensor for name, tensor in partly.items() if is_expert_or_head(name)}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in trained.items())
    assert not any(partly[name].any() for name in partly.keys() - trained.keys())
    assert all(whole[name].any() for name in partly.keys() - trained.keys())
    norm = torch.stack([tensor.square().sum() for tensor in trained.values()]).sum().sqrt().item()
    assert runs["mlp-one"].list_metrics("grad_norm")[0] == pytest.approx(norm, rel=1e-5)
    assert runs["critic-one"].list_metrics("grad_norm")[0] > 1.01 * norm


def is_expert_or_head(name: str) -> bool:
    return ".mlp.experts." in name or name == "score.weight"


def test_the_load_balancing_terms_add_their_own_gradient(start: tuple[Path, Any], runs: dict[str, LayoutRun]) -> None:
    model = start[1]
    balance, z, _ = compute_terms(model)
    model.zero_grad()
    (2 * (AUX_COEF * balance + Z_COEF * z)).backward()
    # The experts of a checkpoint have names of their own, those of transformers' model are stacked.
    expected = {name: param.grad for name, param in model.named_parameters() if ".experts." not in name}
    with_terms, without = runs["one"].read("gradient"), runs["one_without_terms"].read("gradient")
    compared = 0
    for name, gradient in expected.items():
        if gradient is None:
            # The head and the last norm come after the last router.
            assert torch.equal(with_terms[name], without[name]), name
            continue
        found = with_terms[name] - without[name]
        assert (found - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7 * with_terms[name].norm(), name
        compared += 1
    assert compared > 15
    assert expected["model.layers.1.mlp.gate.weight"].norm() > 1e-3


@pytest.mark.parametrize("name", ["one", *CUTS, *LAYOUTS, RECOMPUTED])
def test_the_load_of_the_experts_is_logged_alike_in_every_layout(
    name: str, start: tuple[Path, Any], runs: dict[str, LayoutRun]
) -> None:
    with torch.no_grad():
        balance, z, load = compute_terms(start[1])
    first = runs[name].metrics[0]
    assert first["policy/moe_aux_loss"] == pytest.approx(balance.item(), rel=1e-5)
    assert first["policy/moe_z_loss"] == pytest.approx(z.item(), rel=1e-5)
    assert first["policy/moe_max_load"] == pytest.approx(load, rel=1e-9)


def test_terms_without_a_coefficient_are_not_logged(runs: dict[str, LayoutRun]) -> None:
    logged = {key for key in runs["one_without_terms"].metrics[0] if "moe" in key}
    assert logged == {"policy/moe_max_load"}


@pytest.mark.parametrize("normalized", [True, False])
def test_logprobs_are_those_of_transformers_in_every_layout(normalized: bool, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "qwen3_moe", norm_topk_prob=normalized)
    expected = padded_reference_logprobs(model, build_sequences(seed=5), 0.8)
    names = ("dp2_ep2", "tp2_sp_etp2", "tp2_sp_ep2")
    specs = {name: build_spec(Role.reference, tmp_path / "model", parallel=LAYOUTS[name]) for name in names}
    for name, found in launch_each(2, evaluate_once, specs).items():
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_a_mixture_of_experts_continues_from_a_checkpoint_of_another_layout(start: tuple[Path, Any]) -> None:
    def build(parallel: ParallelConfig) -> Any:
        return build_spec(Role.policy, start[0], parallel=parallel)

    others = {name: build(LAYOUTS[name]) for name in ("dp2_ep2", "tp2_sp_ep2", "tp2_sp_etp2")}
    with tempfile.TemporaryDirectory() as scratch:
        (saved,) = launch_each(2, train_and_save, {"saved": build(LAYOUTS["dp2_ep2"])}, scratch=scratch).values()
        loaded = launch_each(2, load_and_train, others, scratch=scratch)
        loaded |= launch_each(1, load_and_train, {"one": build(ParallelConfig())}, scratch=scratch)
    assert loaded["dp2_ep2"]["checksum"] == saved["checksum"]
    for name, run in loaded.items():
        for tensor_name, tensor in saved["after"]["weights"].items():
            torch.testing.assert_close(
                run["after"]["weights"][tensor_name], tensor, rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
