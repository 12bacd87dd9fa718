"""Responses with tokens of the environment in them: the engine's gradient is that of transformers and a plain loss over
the tokens which the policy generated.
"""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import reference
import torch
from layout_runs import build_conversations, build_spec, find_gradients, launch_each
from tiny_checkpoints import compute_padded_kl, write_checkpoint

from megarl.config.schema.algo import AlgoConfig, KLConfig, KLEstimator, LossAggMode, MismatchConfig, MismatchCorrection
from megarl.config.schema.roles import OptimizerConfig
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


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("conversations") / "qwen3"
    return path, write_checkpoint(path)


@pytest.fixture(scope="module")
def runs(start: tuple[Path, Any]) -> dict[str, Any]:
    # No clipping, which would scale the gradient in its place.
    optimizer = OptimizerConfig(lr=1e-2, eps=1e-3, clip_grad=1e9)
    roles = (Role.policy, Role.critic)
    specs = {
        role.value: build_spec(role, start[0], algo=ALGO, optimizer=optimizer, tokens_per_microbatch=60)
        for role in roles
    }
    return launch_each(1, find_gradients, specs)


def as_lists(samples: TrainingSamples) -> SimpleNamespace:
    return SimpleNamespace(
        mask=samples.mask.tolist(),
        loss_mask=samples.loss_mask.tolist(),
        positive=samples.positive.tolist(),
        advantages=samples.advantages.tolist(),
        old=samples.old_logprobs.tolist(),
        rollout=samples.rollout_logprobs.tolist(),
        ref=samples.ref_logprobs.tolist(),
        old_values=samples.old_values.tolist(),
        returns=samples.returns.tolist(),
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
    samples = build_conversations()
    before, after = samples.mask[:, :-1], samples.mask[:, 1:]
    assert (~before & after).any(1).sum() >= 6
    assert samples.advantages.isnan().sum() > 20
    last = samples.mask.gather(1, samples.sequences.response_lengths[:, None] - 1).squeeze(1)
    some = samples.mask.any(1)
    assert (~samples.mask[some, 0]).sum() >= 3
    assert (~last[some]).sum() >= 3
    assert some.tolist() == [row != 5 for row in range(12)]


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_a_minibatch_without_any_token_has_finite_metrics_and_no_gradient(role: str, runs: dict[str, Any]) -> None:
    empty = runs[role]["empty"]
    assert torch.tensor(list(empty.values())).isfinite().all(), empty
    assert empty[f"{role}/grad_norm"] == 0.0
    assert empty[f"{role}/loss"] == 0.0
    assert empty.keys() == runs[role]["metrics"].keys()


def test_the_policys_gradient_is_that_of_the_generated_tokens_alone(
    start: tuple[Path, Any], runs: dict[str, Any]
) -> None:
    run, samples = runs["policy"], build_conversations()
    model, frozen = copy.deepcopy(start[1]), start[1].double()
    model.load_state_dict(run["weights"])
    model.double()

    def score(tokens: torch.Tensor, places: slice, response: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_p = torch.log_softmax(model(tokens).logits[0, places] / TEMPERATURE, -1)
        return log_p.gather(1, response[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)

    logprobs, entropy = run_rows(samples, score)
    kl = compute_padded_kl(model, frozen, samples.sequences, TEMPERATURE)
    loss = reference.policy_loss(logprobs, entropy, as_lists(samples), ALGO, 32, kl)
    loss.backward()
    assert run["metrics"]["policy/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert run["metrics"]["policy/kl_loss"] > 1e-4
    assert_same_gradients(run["gradient"], {name: p.grad for name, p in model.named_parameters()})


def test_the_critics_gradient_is_that_of_the_generated_tokens_alone(
    start: tuple[Path, Any], runs: dict[str, Any]
) -> None:
    run, samples = runs["critic"], build_conversations()
    model = copy.deepcopy(start[1]).double().model
    weights = dict(run["weights"])
    head = weights.pop("score.weight").double().requires_grad_()
    model.load_state_dict({name.removeprefix("model."): x.double() for name, x in weights.items()})
    (values,) = run_rows(
        samples, lambda tokens, places, _: ((model(tokens).last_hidden_state[0, places] @ head.T).squeeze(1),)
    )
    loss = reference.critic_loss(values, as_lists(samples), ALGO)
    loss.backward()
    assert run["metrics"]["critic/loss"] == pytest.approx(loss.item(), rel=1e-5)
    expected = {f"model.{name}": p.grad for name, p in model.named_parameters()} | {"score.weight": head.grad}
    assert_same_gradients(run["gradient"], expected)
