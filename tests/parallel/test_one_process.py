"""What one process computes, against transformers and against what a run says of itself; layouts: test_layouts.py."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from check_layouts import LayoutRun, run_layouts
from layout_runs import ALL_ROWS, build_spec, launch_each, read, train
from tiny_checkpoints import (
    build_samples,
    build_sequences,
    compute_padded_kl,
    padded_reference_logprobs,
    write_checkpoint,
)

from megarl.config.schema.algo import AlgoConfig, KLConfig, KLEstimator
from megarl.config.schema.roles import Dtype, OptimizerConfig, Trainable
from megarl.mcore.spec import Role

pytestmark = pytest.mark.slow

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3"},
    "qwen2_tied": {"family": "qwen2", "tied": True},
    "llama_tied": {"family": "llama", "tied": True},
    "experts": {"family": "qwen3_moe"},
    "experts_unnormalized": {"family": "qwen3_moe", "norm_topk_prob": False},
}
FULL_KL = AlgoConfig(kl=KLConfig(in_loss=True, loss_estimator=KLEstimator.full, loss_coef=0.3))
AUX_COEF, Z_COEF = 0.1, 0.01
TERMS = {"moe_aux_loss_coeff": AUX_COEF, "moe_z_loss_coeff": Z_COEF}
NUM_EXPERTS, TOP_K = 4, 2


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: (root / name, write_checkpoint(root / name, **fields)) for name, fields in CHECKPOINTS.items()}


@pytest.fixture(scope="module")
def one(checkpoints: dict[str, tuple[Path, Any]]) -> dict[str, Any]:
    paths = {name: path for name, (path, _) in checkpoints.items()}
    runs = {name: (build_spec(Role.policy, path), ALL_ROWS) for name, path in paths.items()}
    runs["reordered"] = (runs["qwen3"][0], [7, 3, 11, 0, 5, 1, 9, 2, 10, 6, 4, 8])
    runs["critic"] = (build_spec(Role.critic, paths["qwen3"]), ALL_ROWS)
    runs["bounded"] = (build_spec(Role.critic, paths["qwen3"], value_range=(-1.0, 2.0)), ALL_ROWS)
    runs["full_kl"] = (build_spec(Role.policy, paths["qwen3"], algo=FULL_KL), ALL_ROWS)
    runs["bf16"] = (build_spec(Role.policy, paths["qwen3"], dtype=Dtype.bfloat16), ALL_ROWS)
    return launch_each(1, train, runs)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_policy_says_what_transformers_says_exports_what_it_loaded_and_moves_every_weight(
    name: str, checkpoints: dict[str, tuple[Path, Any]], one: dict[str, Any]
) -> None:
    path, model = checkpoints[name]
    before, after = one[name]["before"], one[name]["after"]
    expected = padded_reference_logprobs(model, build_sequences(seed=5), 0.8)
    torch.testing.assert_close(before["evaluation"], expected, rtol=0, atol=1e-5)
    source = read(path)
    assert before["weights"].keys() == source.keys()
    assert all(torch.equal(before["weights"][key], source[key]) for key in source)
    # Otherwise equality after training would show little.
    assert all((after["weights"][key] - source[key]).abs().max() > 1e-4 for key in source)


def test_training_does_not_depend_on_the_order_of_the_rows(one: dict[str, Any]) -> None:
    found, expected = one["reordered"], one["qwen3"]
    for step, other in zip(found["metrics"], expected["metrics"], strict=True):
        assert step == pytest.approx(other, rel=2e-5, abs=2e-6)
    for name, tensor in expected["after"]["weights"].items():
        torch.testing.assert_close(found["after"]["weights"][name], tensor, rtol=0, atol=2e-6)


def test_the_full_kl_is_that_of_the_trained_model_and_the_start_checkpoint(
    checkpoints: dict[str, tuple[Path, Any]], one: dict[str, Any]
) -> None:
    run, start = one["full_kl"], checkpoints["qwen3"][1]
    assert torch.equal(run["before"]["reference_kl"], torch.zeros_like(run["before"]["reference_kl"]))
    assert run["metrics"][0]["policy/kl_loss"] == 0.0
    assert run["metrics"][2]["policy/kl_loss"] > 1e-3
    trained = copy.deepcopy(start)
    trained.load_state_dict(run["after"]["weights"])
    expected = compute_padded_kl(trained, start, build_sequences(seed=5), 0.8)
    assert expected.max() > 1e-2
    torch.testing.assert_close(run["after"]["reference_kl"], expected.float(), rtol=1e-4, atol=1e-5)


def test_new_values_start_at_zero_or_in_the_middle_of_their_bounds_stay_inside_and_learn(one: dict[str, Any]) -> None:
    lengths = build_sequences(seed=5).response_lengths[:, None]
    for name, middle in (("critic", 0.0), ("bounded", 0.5)):
        before, after = (one[name][when]["evaluation"] for when in ("before", "after"))
        exists = torch.arange(after.shape[1]) < lengths
        assert bool((before[exists] == middle).all())
        assert (after[exists] - middle).abs().max() > 0.01
        assert one[name]["metrics"][-1]["critic/loss"] < one[name]["metrics"][0]["critic/loss"]
    assert -1 < after[exists].min() < after[exists].max() < 2


def test_bfloat16_stays_near_float32(one: dict[str, Any]) -> None:
    found, expected = one["bf16"], one["qwen3"]
    torch.testing.assert_close(found["before"]["evaluation"], expected["before"]["evaluation"], rtol=0, atol=0.1)
    norms = [run["metrics"][0]["policy/grad_norm"] for run in (found, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=0.05)


# Mixtures of experts


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
    specs = {
        name: build_spec(role, start[0], optimizer=optimizer, **fields)
        for name, role, fields in (
            ("one", Role.policy, {"megatron": TERMS}),
            ("one_without_terms", Role.policy, {}),
            ("critic-one", Role.critic, {"megatron": TERMS}),
            ("mlp-one", Role.critic, {"megatron": TERMS, "trainable": Trainable.mlp}),
        )
    }
    return run_layouts(specs, build_samples(), 1, tmp_path_factory.mktemp("runs"))


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


def test_the_gradient_of_trained_weights_is_that_of_a_critic_which_is_trained_whole(runs: dict[str, LayoutRun]) -> None:
    whole, partly = runs["critic-one"].read("gradient"), runs["mlp-one"].read("gradient")
    trained = {name: tensor for name, tensor in partly.items() if ".mlp.experts." in name or name == "score.weight"}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in trained.items())
    assert not any(partly[name].any() for name in partly.keys() - trained.keys())
    assert all(whole[name].any() for name in partly.keys() - trained.keys())
    norm = torch.stack([tensor.double().square().sum() for tensor in trained.values()]).sum().sqrt().item()
    assert runs["mlp-one"].list_metrics("grad_norm")[0] == pytest.approx(norm, rel=1e-5)
    assert runs["critic-one"].list_metrics("grad_norm")[0] > 1.01 * norm


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


def test_the_load_of_the_experts_and_terms_with_a_coefficient_are_logged(
    start: tuple[Path, Any], runs: dict[str, LayoutRun]
) -> None:
    with torch.no_grad():
        balance, z, load = compute_terms(start[1])
    found = {key: value for key, value in runs["one"].metrics[0].items() if "moe" in key}
    expected = {"policy/moe_aux_loss": balance.item(), "policy/moe_z_loss": z.item(), "policy/moe_max_load": load}
    assert found == pytest.approx(expected, rel=1e-5)
    assert {key for key in runs["one_without_terms"].metrics[0] if "moe" in key} == {"policy/moe_max_load"}
