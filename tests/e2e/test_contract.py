"""What the loop relies on in its three interfaces: the same checks of the fakes (tests/fakes) and of the real parts.

Real: Megatron-Core policy, critic and reference in Ray, the session's SGLang server, and the sync between them.
"""

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes.run import World
from generation import generate_groups
from loop_parts import SIZES, hosts_of, open_trainer

from megarl.interfaces import TrainBackend
from megarl.rollout.collector import build_tensors
from megarl.trainer import Trainer
from megarl.types import Prompt, Response, Rollout, Sample, Score, Sequences, TrainingSamples

OVERRIDES = ("algo=ppo", "algo.kl.in_reward=true", "algo.kl.reward_estimator=k1", "policy.optimizer.lr=0.02")
VERSIONS = itertools.count(1)
BOUND = 1e-4
"""Between the log-probs of the training engine and those of the servers"""


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=[pytest.mark.slow, pytest.mark.server])])
def trainer(
    request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trainer]:
    """Its components are what is checked; the servers hold the policy's weights."""
    run_dir = tmp_path_factory.mktemp("contract")
    overrides = [*OVERRIDES, f"model.path={tiny_checkpoint}"]
    with ExitStack() as stack:
        if request.param == "fake":
            opened = stack.enter_context(World().open_trainer(run_dir, [*SIZES, *overrides]))
        else:
            hosts = stack.enter_context(hosts_of(request.getfixturevalue("server"), num_workers=3))
            opened = stack.enter_context(open_trainer(hosts, run_dir, overrides))
        opened.fleet.publish(0)
        yield opened


def publish(trainer: Trainer) -> int:
    """The present weights as the next version."""
    trainer.fleet.publish(next(VERSIONS))
    return trainer.fleet.version


def list_prompts(trainer: Trainer, num: int) -> tuple[Prompt, ...]:
    return tuple(trainer.fleet.heldout[:num])


def generate(trainer: Trainer, num: int = 6, temperature: float = 1.0, key: str | None = None) -> list[list[Response]]:
    return generate_groups(
        trainer.components.engine,
        list_prompts(trainer, num),
        num_responses=4,
        temperature=temperature,
        key=key,
        response_length=trainer.config.rollout.response_length,
    )


def build_rollout(trainer: Trainer, groups: list[list[Response]]) -> Rollout:
    prompts = list_prompts(trainer, len(groups))
    samples = (Sample(p, r, Score(0.0, False), i) for i, p in enumerate(prompts) for r in groups[i])
    return Rollout(tuple(samples), trainer.fleet.version)


def build_samples(trainer: Trainer) -> TrainingSamples:
    """Targets that are no model's, of responses that the policy generated."""
    tensors = build_tensors(build_rollout(trainer, generate(trainer, key="samples")))
    generator = torch.Generator().manual_seed(3)
    mask = tensors.mask

    def draw(deviation: float) -> torch.Tensor:
        return deviation * torch.randn(mask.shape, generator=generator) * mask

    old = trainer.roles.policy.logprobs(tensors.sequences, 1.0).result()
    return TrainingSamples(
        sequences=tensors.sequences,
        mask=mask,
        loss_mask=mask,
        positive=torch.zeros(len(mask), dtype=torch.bool),
        advantages=draw(1.0),
        rollout_logprobs=tensors.rollout_logprobs,
        old_logprobs=old,
        sampling_logprobs=old,
        ref_logprobs=old,
        old_values=draw(0.1),
        returns=draw(1.0),
    )


def evaluate(trainer: Trainer, role: str, sequences: Sequences) -> torch.Tensor:
    backend: TrainBackend = getattr(trainer.roles, role)
    pending = backend.values(sequences) if role == "critic" else backend.logprobs(sequences, 1.0)
    return pending.result()


ROLES = ("policy", "critic", "reference")
TRAINED = ("policy", "critic")
ROWS = [torch.arange(0, 12), torch.arange(12, 24)]


@pytest.mark.parametrize("role", ROLES)
def test_what_a_role_says_has_a_float32_for_each_response_token_in_the_order_of_the_rows(trainer, role):
    rollout = build_rollout(trainer, generate(trainer))
    tensors = build_tensors(rollout)
    found = evaluate(trainer, role, tensors.sequences)
    assert found.dtype == torch.float32
    assert found.shape == tensors.mask.shape
    assert torch.all(found[~tensors.mask] == 0)
    assert role == "critic" or bool((found[tensors.mask] < 0).all())
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(1))
    shuffled = evaluate(trainer, role, tensors.sequences.select(order))
    torch.testing.assert_close(shuffled, found[order], rtol=0, atol=1e-5)
    short = evaluate(trainer, role, tensors.sequences.select(order[:1]))
    assert short.shape == (1, int(tensors.mask[order[0]].sum()))


def test_responses_have_an_entry_for_each_token_and_end_with_the_eos_token_or_at_the_limit(trainer):
    groups = generate(trainer)
    assert [len(group) for group in groups] == [4] * 6
    longest = trainer.config.rollout.response_length
    for response in (r for group in groups for r in group):
        num = len(response.token_ids)
        assert num == len(response.rollout_logprobs) == len(response.generated) == len(response.weight_versions) > 0
        assert all(response.generated)
        stopped = response.token_ids[-1] == 2
        assert (response.finish_reason.value == "stop") == stopped
        assert stopped or num == longest
        assert 2 not in response.token_ids[:-1]
        assert response.weight_versions.versions == (trainer.fleet.version,)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rollout_logprobs_are_the_training_engines_before_and_after_an_update(trainer, temperature):
    def compute_gap() -> float:
        tensors = build_tensors(build_rollout(trainer, generate(trainer, temperature=temperature)))
        own = trainer.roles.policy.logprobs(tensors.sequences, temperature).result()
        return float((own - tensors.rollout_logprobs)[tensors.mask].abs().max())

    assert compute_gap() < BOUND
    trainer.roles.policy.update(build_samples(trainer), ROWS).result()
    assert compute_gap() > 10 * BOUND
    publish(trainer)
    assert compute_gap() < BOUND


@pytest.mark.parametrize("role", TRAINED)
def test_an_update_takes_one_step_for_each_minibatch_and_moves_the_role_and_no_other(trainer, role):
    samples, backend = build_samples(trainer), getattr(trainer.roles, role)
    before = {name: evaluate(trainer, name, samples.sequences) for name in ROLES}
    metrics = backend.update(samples, [*ROWS, ROWS[0]]).result()
    assert len(metrics) == 3
    for step in metrics:
        assert step[f"{role}/grad_norm"] > 0
        assert step[f"{role}/lr"] > 0
        assert isinstance(step[f"{role}/loss"], float)
        assert all(name.startswith(f"{role}/") for name in step)
    assert [step.keys() for step in metrics] == [metrics[0].keys()] * 3
    after = {name: evaluate(trainer, name, samples.sequences) for name in ROLES}
    for name in ROLES:
        assert torch.equal(after[name], before[name]) == (name != role)
    assert backend.update(samples, []).result() == []
    assert torch.equal(evaluate(trainer, role, samples.sequences), after[role])


def test_an_update_without_old_logprobs_gives_those_before_it_in_the_order_of_the_samples(trainer, tmp_path):
    samples, policy = build_samples(trainer), trainer.roles.policy
    order = torch.randperm(24, generator=torch.Generator().manual_seed(2))
    save(policy, tmp_path / "state")
    (given,) = policy.update(samples, [order]).result()
    policy.load(tmp_path / "state").result()
    (own,) = policy.update(replace(samples, old_logprobs=None), [order]).result()
    found = policy.updated_logprobs(samples.sequences).result()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[samples.mask], samples.old_logprobs[samples.mask], rtol=0, atol=1e-5)
    assert torch.all(found[~samples.mask] == 0)
    assert own == pytest.approx(given, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("role", TRAINED)
def test_a_step_depends_on_its_own_rows_alone(trainer, role, tmp_path):
    samples, backend = build_samples(trainer), getattr(trainer.roles, role)
    save(backend, tmp_path / "state")
    (first, _) = backend.update(samples, ROWS).result()
    backend.load(tmp_path / "state").result()
    (alone,) = backend.update(samples.select(ROWS[0]), [torch.arange(12)]).result()
    assert alone == pytest.approx(first, rel=1e-4, abs=1e-6)


def save(backend: TrainBackend, directory: Path) -> None:
    backend.begin_save(directory).result()
    backend.finish_save().result()


@pytest.mark.parametrize("role", TRAINED)
def test_a_role_returns_to_what_it_was_when_its_save_began_and_goes_on_the_same(trainer, role, tmp_path):
    samples, backend = build_samples(trainer), getattr(trainer.roles, role)
    # Moments of the optimizer and a place in the schedule.
    backend.update(samples, ROWS).result()
    saved = evaluate(trainer, role, samples.sequences)
    backend.begin_save(tmp_path / "state").result()
    metrics = backend.update(samples, ROWS).result()
    backend.finish_save().result()
    moved = evaluate(trainer, role, samples.sequences)
    assert not torch.equal(moved, saved)
    assert any((tmp_path / "state").iterdir())
    backend.update(samples, ROWS).result()
    backend.load(tmp_path / "state").result()
    assert torch.equal(evaluate(trainer, role, samples.sequences), saved)
    assert backend.update(samples, ROWS).result() == metrics
    assert torch.equal(evaluate(trainer, role, samples.sequences), moved)


def test_an_error_in_a_role_comes_when_its_call_is_waited_for(trainer, tmp_path):
    pending = trainer.roles.policy.load(tmp_path / "nowhere")
    with pytest.raises(Exception, match="nowhere"):
        pending.wait(60)
    with pytest.raises(Exception, match="nowhere"):
        pending.result()


def test_a_version_that_is_published_is_that_of_the_responses_and_may_be_published_again(trainer):
    version = publish(trainer)
    first = generate(trainer, key="versions")
    trainer.components.sync.publish(version)
    assert generate(trainer, key="versions") == first
    assert {v for group in first for r in group for v in r.weight_versions.versions} == {version}


def test_a_key_repeats_its_responses_and_others_have_others(trainer):
    first = generate(trainer, key="a")
    others = [generate(trainer, key="b"), generate(trainer), generate(trainer)]
    assert generate(trainer, key="a") == first
    texts = [tuple(tuple(r.token_ids) for group in groups for r in group) for groups in (first, *others)]
    assert len(set(texts)) == 4
    assert all(len({tuple(r.token_ids) for r in group}) > 1 for group in first)


def test_temperature_zero_is_greedy_with_the_logprobs_of_temperature_one(trainer):
    groups = generate(trainer, temperature=0.0, key="greedy")
    assert groups == generate(trainer, temperature=0.0, key="another")
    assert all(r.token_ids.tolist() == group[0].token_ids.tolist() for group in groups for r in group)
    tensors = build_tensors(build_rollout(trainer, groups))
    own = trainer.roles.policy.logprobs(tensors.sequences, 1.0).result()
    assert float((own - tensors.rollout_logprobs)[tensors.mask].abs().max()) < BOUND
    # At every token the likeliest: at a low temperature it has nearly all of the probability.
    cold = trainer.roles.policy.logprobs(tensors.sequences, 1e-4).result()
    assert float(cold[tensors.mask].min()) > -1.0


def test_a_cancelled_call_raises_and_later_ones_are_as_ever(trainer):
    engine, errors, prompts = trainer.components.engine, [], list_prompts(trainer, 1) * 400

    def ask() -> None:
        try:
            while True:
                generate_groups(engine, prompts, num_responses=4, temperature=1.0)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
        engine.cancel()
    assert isinstance(errors[0], CancelledError)
    assert generate(trainer)


def test_prompts_that_no_server_could_take_are_refused(trainer):
    for ids in ((5, 10_000), ()):
        with pytest.raises(ValueError, match=r"bad|prompt 0"):
            generate_groups(trainer.components.engine, [Prompt("bad", "", ids, "")], num_responses=1, temperature=1.0)
    trainer.components.engine.check_health()
