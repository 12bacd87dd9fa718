"""What one process computes, against transformers and plain losses, also of responses with tokens of the environment in
them and with given experts, beside the routers' own choice; layouts: test_layouts.py.
"""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from algo_cases import samples_as_lists
from layout_runs import (
    Run,
    build_conversations,
    build_spec,
    evaluate,
    give_experts,
    launch_each,
    run_layouts,
    run_specs,
)
from tiny_checkpoints import (
    build_samples,
    build_sequences,
    compute_padded_kl,
    padded_reference_logprobs,
    write_checkpoint,
)
from torch.nn import functional as F

from megarl.config.schema.algo import (
    AlgoConfig,
    KLConfig,
    KLEstimator,
    LossAggMode,
    MismatchConfig,
    MismatchCorrection,
    ValueLoss,
)
from megarl.config.schema.roles import Dtype, OptimizerConfig, Trainable
from megarl.mcore.spec import Role
from megarl.types import TrainingSamples

pytestmark = pytest.mark.slow

TEMPERATURE = 0.8
ALGO = AlgoConfig(
    loss_agg_mode=LossAggMode["seq-mean-token-mean"],
    value_loss_agg_mode=LossAggMode["seq-mean-token-mean"],
    value_clip=0.3,
    entropy_coef=0.1,
    positive_lm_coef=0.1,
    dual_clip=1.5,
    kl=KLConfig(in_loss=True, loss_estimator=KLEstimator.full, loss_coef=0.3),
    mismatch=MismatchConfig(correction=MismatchCorrection.tis),
)
PROBABILITY = AlgoConfig(value_loss=ValueLoss.cross_entropy)
AUX_COEF, Z_COEF = 0.1, 0.01
TERMS = {"moe_aux_loss_coeff": AUX_COEF, "moe_z_loss_coeff": Z_COEF}
NUM_EXPERTS, TOP_K = 4, 2
SAMPLES = build_conversations()
CONVERSATIONS = {"samples": SAMPLES, "verbs": "update weights:weights gradient:gradient update"}
IMITATION = AlgoConfig(advantage="none", rl_loss_coef=0.0, positive_lm_coef=1.0)
DEMONSTRATIONS = replace(
    SAMPLES,
    loss_mask=SAMPLES.mask,
    positive=torch.ones_like(SAMPLES.positive),
    **dict.fromkeys(("advantages", "rollout_logprobs", "old_logprobs"), torch.zeros(()).expand(SAMPLES.mask.shape)),
)
NOTHING = torch.zeros_like(SAMPLES.mask)
EMPTY = {"samples": replace(SAMPLES, mask=NOTHING, loss_mask=NOTHING), "verbs": "update"}
"""A minibatch in which all samples have failed"""
ROWS: dict[str, tuple[Role, str, dict[str, Any], dict[str, Any]]] = {
    "policy": (Role.policy, "qwen3", {"algo": ALGO, "tokens_per_microbatch": 60}, CONVERSATIONS),
    "critic": (Role.critic, "qwen3", {"algo": ALGO, "tokens_per_microbatch": 60}, CONVERSATIONS),
    "empty_policy": (Role.policy, "qwen3", {"algo": ALGO}, EMPTY),
    "empty_critic": (Role.critic, "qwen3", {"algo": ALGO}, EMPTY),
    "plain": (Role.policy, "qwen3", {}, {}),
    "full_kl": (Role.policy, "qwen3", {"algo": AlgoConfig(kl=ALGO.kl)}, {}),
    "bfloat16": (Role.policy, "qwen3", {"dtype": Dtype.bfloat16}, {}),
    "values": (Role.critic, "qwen3", {}, {}),
    "bounded": (Role.critic, "qwen3", {"value_range": (-1.0, 2.0), "critic_prompt": "answer: {answer}"}, {}),
    "cross_entropy": (Role.critic, "qwen3", {"algo": PROBABILITY, "value_range": (-1.0, 2.0)}, {}),
    "imitation": (
        *(Role.policy, "qwen3", {"algo": IMITATION, "temperature": 1.0, "tokens_per_microbatch": 60}),
        {"samples": DEMONSTRATIONS, "verbs": "gradient:gradient update"},
    ),
    "experts": (Role.policy, "qwen3_moe", {}, {}),
    "experts_terms": (Role.policy, "qwen3_moe", {"megatron": TERMS}, {}),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one")


@pytest.fixture(scope="module")
def models(root: Path) -> dict[str, Any]:
    made = {family: write_checkpoint(root / family, family) for family in ("qwen3", "qwen3_moe")}
    # The grouped product of experts has no float64.
    made["qwen3_moe"].set_experts_implementation("eager")
    return {family: model.double() for family, model in made.items()}


@pytest.fixture(scope="module")
def runs(root: Path, models: dict[str, Any]) -> dict[str, Run]:
    # No clipping, which would scale the gradient in its place.
    optimizer = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, clip_grad=1e9)
    specs = {
        name: (build_spec(role, root / family, optimizer=optimizer, **fields), given)
        for name, (role, family, fields, given) in ROWS.items()
    }
    return run_specs(
        root / "runs", specs, "evaluate details gradient:gradient update:3 evaluate details weights:weights"
    )


def run_rows(samples: TrainingSamples, head: Any) -> tuple[torch.Tensor, ...]:
    """head(tokens, the positions that predict the response, the response) of every row, padded to [B, T]."""
    found = []
    rows = samples.sequences.tokens.split(samples.sequences.lengths.tolist())
    for tokens, prompt in zip(rows, samples.sequences.prompt_lengths.tolist(), strict=True):
        found.append(head(tokens[None], slice(prompt - 1, -1), tokens[prompt:]))
    return tuple(torch.nn.utils.rnn.pad_sequence(list(x), batch_first=True) for x in zip(*found, strict=True))


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.abs().max() > 1e-5, name
        torch.testing.assert_close(
            found[name].double(), tensor, rtol=1e-3, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_conversations_have_environment_tokens_within_responses() -> None:
    samples = SAMPLES
    before, after = samples.mask[:, :-1], samples.mask[:, 1:]
    assert (~before & after).any(1).sum() >= 6
    assert samples.advantages.isnan().sum() > 20
    assert samples.mask.any(1).tolist() == [row != 5 for row in range(12)]


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_a_minibatch_without_any_token_has_finite_metrics_and_no_gradient(role: str, runs: dict[str, Run]) -> None:
    (empty,) = runs[f"empty_{role}"].metrics
    assert torch.tensor(list(empty.values())).isfinite().all(), empty
    assert empty[f"{role}/grad_norm"] == empty[f"{role}/loss"] == 0.0
    assert empty.keys() == runs[role].metrics[-1].keys()


def test_the_policys_gradient_is_that_of_the_generated_tokens_alone(
    models: dict[str, Any], runs: dict[str, Run]
) -> None:
    run, samples, model = runs["policy"], SAMPLES, copy.deepcopy(models["qwen3"])
    model.load_state_dict(run.read("weights"))

    def score(tokens: torch.Tensor, places: slice, response: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_p = torch.log_softmax(model(tokens).logits[0, places] / TEMPERATURE, -1)
        return log_p.gather(1, response[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)

    logprobs, entropy = run_rows(samples, score)
    kl = compute_padded_kl(model, models["qwen3"], samples.sequences, TEMPERATURE)
    loss = reference.policy_loss(logprobs, entropy, samples_as_lists(samples), ALGO, 32, kl)
    loss.backward()
    assert run.metrics[-1]["policy/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert run.metrics[-1]["policy/kl_loss"] > 1e-4
    assert_same_gradients(run.read("gradient"), {name: p.grad for name, p in model.named_parameters()})


def test_the_loss_of_demonstrations_and_its_gradient_are_those_of_transformers(
    models: dict[str, Any], runs: dict[str, Run]
) -> None:
    """On turns of the assistant between those of others, whose labels are -100; one mean over the batch's tokens."""
    run, samples, model = runs["imitation"], DEMONSTRATIONS, copy.deepcopy(models["qwen3"])
    rows = samples.sequences.tokens.split(samples.sequences.lengths.tolist())
    labels = []
    for tokens, prompt, mask in zip(rows, samples.sequences.prompt_lengths.tolist(), samples.mask, strict=True):
        inside = torch.cat([torch.zeros(prompt, dtype=torch.bool), mask[: len(tokens) - prompt]])
        labels.append(torch.where(inside, tokens, -100))
    pad = torch.nn.utils.rnn.pad_sequence
    exists = pad([torch.ones_like(row) for row in rows], batch_first=True)
    ids = pad(list(rows), batch_first=True)
    loss = model(input_ids=ids, attention_mask=exists, labels=pad(labels, True, padding_value=-100)).loss
    loss.backward()
    assert run.metrics[0]["policy/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert run.metrics[0]["policy/positive_lm"] == pytest.approx(loss.item(), rel=1e-5)
    assert_same_gradients(run.read("gradient"), {name: p.grad for name, p in model.named_parameters()})


def test_the_critics_gradient_is_that_of_the_generated_tokens_alone(
    models: dict[str, Any], runs: dict[str, Run]
) -> None:
    run, samples, model = runs["critic"], SAMPLES, copy.deepcopy(models["qwen3"]).model
    weights = run.read("weights")
    head = weights.pop("score.weight").double().requires_grad_()
    model.load_state_dict({name.removeprefix("model."): x.double() for name, x in weights.items()})
    (values,) = run_rows(
        samples, lambda tokens, places, _: ((model(tokens).last_hidden_state[0, places] @ head.T).squeeze(1),)
    )
    loss = reference.critic_loss(values, samples_as_lists(samples), ALGO)
    loss.backward()
    assert run.metrics[-1]["critic/loss"] == pytest.approx(loss.item(), rel=1e-5)
    expected = {f"model.{name}": p.grad for name, p in model.named_parameters()} | {"score.weight": head.grad}
    assert_same_gradients(run.read("gradient"), expected)


def test_the_full_kl_is_that_of_the_trained_model_and_the_start_checkpoint(
    models: dict[str, Any], runs: dict[str, Run]
) -> None:
    run, start = runs["full_kl"], models["qwen3"]
    before, after = run["reference_kl"]
    assert not before.any()
    assert run.metrics[0]["policy/kl_loss"] == 0.0
    assert run.metrics[2]["policy/kl_loss"] > 1e-3
    trained = copy.deepcopy(start)
    trained.load_state_dict(run.read("weights"))
    expected = compute_padded_kl(trained, start, build_sequences(seed=5), TEMPERATURE)
    assert expected.max() > 1e-2
    torch.testing.assert_close(after, expected.float(), rtol=1e-4, atol=1e-5)


def test_new_values_start_at_zero_or_in_the_middle_of_their_bounds_stay_inside_and_learn(runs: dict[str, Run]) -> None:
    lengths = build_sequences(seed=5).response_lengths[:, None]
    for name, middle in (("values", 0.0), ("bounded", 0.5), ("cross_entropy", 0.5)):
        before, after = runs[name]["evaluate"]
        exists = torch.arange(after.shape[1]) < lengths
        assert (before[exists] - middle).abs().max() == 0.0
        assert (after[exists] - middle).abs().max() > 0.01
        assert runs[name].metrics[-1]["critic/loss"] < runs[name].metrics[0]["critic/loss"]
        assert name == "values" or -1 < after[exists].min() < after[exists].max() < 2


def test_an_exported_critic_records_its_text_and_bounds(runs: dict[str, Run]) -> None:
    files = {name: runs[name].directory / "weights" / "config.json" for name in ("bounded", "values", "plain")}
    configs = {name: json.loads(file.read_text()) for name, file in files.items()}
    assert configs["bounded"]["megarl_critic_prompt"] == "answer: {answer}"
    assert configs["bounded"]["megarl_value_range"] == [-1.0, 2.0]
    assert configs["values"]["megarl_critic_prompt"] is None
    assert not {key for key in configs["plain"] if key.startswith("megarl")}


def test_bfloat16_stays_near_float32(runs: dict[str, Run]) -> None:
    found, expected = runs["bfloat16"], runs["plain"]
    torch.testing.assert_close(found["evaluate"][0], expected["evaluate"][0], rtol=0, atol=0.1)
    assert found.list_metrics("grad_norm")[0] == pytest.approx(expected.list_metrics("grad_norm")[0], rel=0.05)


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


def test_the_load_balancing_terms_are_logged_and_add_their_own_gradient(
    models: dict[str, Any], runs: dict[str, Run]
) -> None:
    model = models["qwen3_moe"]
    balance, z, load = compute_terms(model)
    found = {key: value for key, value in runs["experts_terms"].metrics[0].items() if "moe" in key}
    expected = {"policy/moe_aux_loss": balance.item(), "policy/moe_z_loss": z.item(), "policy/moe_max_load": load}
    assert found == pytest.approx(expected, rel=1e-5)
    assert {key for key in runs["experts"].metrics[0] if "moe" in key} == {"policy/moe_max_load"}
    (2 * (AUX_COEF * balance + Z_COEF * z)).backward()
    # The experts of a checkpoint have names of their own, those of transformers' model are stacked.
    gradients = {name: param.grad for name, param in model.named_parameters() if ".experts." not in name}
    with_terms, without = runs["experts_terms"].read("gradient"), runs["experts"].read("gradient")
    for name, gradient in gradients.items():
        if gradient is None:
            # The head and the last norm come after the last router.
            assert torch.equal(with_terms[name], without[name]), name
        else:
            difference = (with_terms[name] - without[name] - gradient).norm()
            assert difference <= 1e-4 * gradient.norm() + 1e-7 * with_terms[name].norm(), name
    assert gradients["model.layers.1.mlp.gate.weight"].norm() > 1e-3


def test_the_gradient_of_trained_weights_is_that_of_a_critic_which_is_trained_whole(
    root: Path, models: dict[str, Any], tmp_path: Path
) -> None:
    specs = {
        name: build_spec(Role.critic, root / "qwen3_moe", megatron=TERMS, trainable=trainable)
        for name, trainable in (("whole", Trainable.all), ("partly", Trainable.mlp))
    }
    runs = run_layouts(tmp_path, specs, build_samples(), "gradient:gradient update")
    whole, partly = (runs[name].read("gradient") for name in ("whole", "partly"))
    trained = {name: tensor for name, tensor in partly.items() if ".mlp.experts." in name or name == "score.weight"}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in trained.items())
    assert not any(partly[name].any() for name in partly.keys() - trained.keys())
    assert all(whole[name].any() for name in partly.keys() - trained.keys())
    norm = torch.stack([tensor.double().square().sum() for tensor in trained.values()]).sum().sqrt().item()
    assert runs["partly"].list_metrics("grad_norm")[0] == pytest.approx(norm, rel=1e-5)
    assert runs["whole"].list_metrics("grad_norm")[0] > 1.01 * norm


NUM_LAYERS = 4


def force_experts(model: Any, experts: torch.Tensor, counts: list[int]) -> None:
    """Have transformers' routers take these experts [tokens, layers, k] of the row at hand, and count in `counts` how
    many sets are also their own and how many are given.
    """
    for layer, block in enumerate(model.model.layers):
        if hasattr(block.mlp.gate, "handle"):
            block.mlp.gate.handle.remove()

        def force(gate: Any, _: Any, out: tuple[torch.Tensor, ...], layer: int = layer) -> tuple[torch.Tensor, ...]:
            logits, _, own = out
            given = experts[:, layer].long() - 1
            exists = given[:, :1] >= 0
            counts[0] += int(((given.sort().values == own.sort().values).all(1) & exists[:, 0]).sum())
            counts[1] += int(exists.sum())
            chosen = torch.where(exists, given, own)
            return logits, logits.gather(1, chosen).softmax(-1), chosen

        block.mlp.gate.handle = block.mlp.gate.register_forward_hook(force)


def test_logprobs_gradient_and_agreement_with_given_experts_are_those_of_transformers_with_them(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "qwen3_moe", "qwen3_moe", num_hidden_layers=NUM_LAYERS)
    sequences, samples = give_experts(build_sequences(seed=5)), build_samples()
    samples = replace(samples, sequences=give_experts(samples.sequences))
    specs = {
        name: build_spec(Role.policy, tmp_path / "qwen3_moe", router_replay=name == "given")
        for name in ("given", "chosen")
    }
    verbs = "evaluate gradient:gradient update:2"
    runs = run_specs(tmp_path, specs, verbs, samples=samples, sequences=(sequences,))
    rows, counts = [], [0, 0]
    assert sequences.routed_experts is not None
    for number, experts in enumerate(sequences.routed_experts.split(sequences.lengths.tolist())):
        force_experts(model, experts, counts)
        rows.append(padded_reference_logprobs(model, sequences.select(torch.tensor([number])), 0.8)[0])
    expected = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    torch.testing.assert_close(runs["given"]["evaluate"][0], expected, rtol=0, atol=1e-5)
    assert (runs["chosen"]["evaluate"][0] - expected).abs().max() > 0.01
    first, second = runs["given"].metrics
    assert 0 < first["policy/moe_routing_agreement"] == counts[0] / counts[1] < 1
    # The weights of the second step are not those that were evaluated.
    assert "policy/moe_routing_agreement" not in second | runs["chosen"].metrics[0]
    key = "model.layers.0.mlp.gate.weight"
    chosen, given = (runs[name].read("gradient")[key] for name in ("chosen", "given"))
    assert (given - chosen).norm() > 0.1 * chosen.norm()


def train_with_routes(worker: Any, directory: Path, experts: torch.Tensor | None) -> dict[str, Any]:
    """Log-probs and the metrics of two steps, with the routers' own choice or that which is given; and the choice."""
    from megarl.mcore.layers import find_routers

    maps: list[torch.Tensor] = []
    samples = build_samples()
    sequences = replace(samples.sequences, routed_experts=experts)
    hooks = [r.register_forward_hook(lambda *x: maps.append(x[2][1])) for r in find_routers(worker.chunks)]
    logprobs = evaluate(worker, sequences)
    for hook in hooks:
        hook.remove()
    metrics = worker.update(replace(samples, sequences=sequences), [torch.arange(12)] * 2)
    # One micro-batch, longest row first.
    rows = worker._batches(sequences)[0].rows
    packed = 1 + torch.stack([m.nonzero()[:, 1].view(len(m), -1) for m in maps], 1).to(torch.uint8)
    # None are given for the dense layers before them.
    packed = F.pad(packed, (0, 0, worker.arch.num_layers - len(maps), 0))
    pieces = dict(zip(rows.tolist(), packed.split(sequences.lengths[rows].tolist()), strict=True))
    return {"logprobs": logprobs, "metrics": metrics, "experts": torch.cat([pieces[row] for row in range(12)])}


@pytest.mark.parametrize(("family", "fields"), [("qwen3_moe", {}), ("glm4_moe", {"first_k_dense_replace": 1})])
def test_the_routers_own_choice_given_back_changes_no_bit(family: str, fields: dict[str, int], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / family, family, num_hidden_layers=NUM_LAYERS, **fields)
    spec = build_spec(Role.policy, tmp_path / family)
    chosen = launch_each(train_with_routes, {"chosen": (spec, None)})["chosen"]
    replayed = (replace(spec, router_replay=True), chosen["experts"])
    given = launch_each(train_with_routes, {"given": replayed})["given"]
    assert torch.equal(chosen["logprobs"], given["logprobs"])
    # Until an update changes the routers' choice, the only difference is that agreement is logged.
    assert given["metrics"][0] == chosen["metrics"][0] | {"policy/moe_routing_agreement": 1.0}
