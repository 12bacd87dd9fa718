"""Iterations in which the critic alone learns, over the fakes (tests/fakes): value pretraining, when it ends and what
it learns, and a frozen policy; runs whose critic alone reads data.critic_prompt.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.backend import FakeBackend
from fakes.disturbed import RUN, Disturbance, Killed, stop
from fakes.run import Said, World, load, pretrain
from safetensors.torch import load_file

from megarl.algo.algorithm import build_pretraining_algo, find_end, fit_rise
from megarl.config.load import load_config
from megarl.config.schema.algo import ValuePretrainConfig
from megarl.files import CheckpointError
from megarl.report.record import load_metrics
from megarl.rollout.rollout_file import Journal
from megarl.signals import Stopped, stopping_on_signals
from megarl.types import Prompt, Response, Score, Sequences, TrainingSamples

VAPO = ("algo=vapo", "algo.value_pretrain.patience=null", "critic.optimizer.lr=0.2", "logger.save_rollouts=true")
STEPS = "algo.value_pretrain.steps=8"
ALONE = (*VAPO, STEPS, "train.num_iterations=0")


def reward_letter(prompt: Prompt, _response: Response) -> Score:
    """Its expectation differs from prompt to prompt: whether the asked letter is a, b or c."""
    return Score(float(prompt.text[0] in "abc"), False)


def test_it_explains_heldout_returns_and_leaves_the_policy_bit_identical(tmp_path: Path) -> None:
    world = World(reward=reward_letter)
    with world.open_trainer(tmp_path, [*VAPO, STEPS]) as trainer:
        policy, critic = trainer.roles.policy, trainer.roles.critic
        before, critic_before = policy.copy_weights(), critic.copy_weights()
        curve = pretrain(trainer)
        assert all(torch.equal(x, before[name]) for name, x in policy.copy_weights().items())
        assert not any(torch.equal(x, critic_before[name]) for name, x in critic.copy_weights().items())
        assert trainer.source.num_samples == 8 * 24
        # Each step takes its samples once, in an order of its own.
        orders = critic.orders
        assert [sorted(order) for order in orders] == [list(range(24))] * 8
        assert len(set(map(tuple, orders))) == 8
        keys = [key for key, _ in trainer.components.engine.asked]
    assert keys[:8] == [f"pretraining-{step}" for step in range(1, 9)]
    assert keys[8].startswith("evaluation-0")
    # Each value is of a rollout that the critic had not trained on; a new value head explains nothing.
    lines = load_metrics(tmp_path / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == list(range(-8, 1))
    assert [line["critic/explained_variance"] for line in lines[1:]] == curve
    assert all("critic/loss" in line and "policy/loss" not in line for line in lines[1:])
    assert curve[0] == pytest.approx(0, abs=1e-6)
    assert min(curve[-2:]) > 0.3
    assert [verb for role, verb in world.log if role == "policy"] == []
    assert world.log.count(("servers", "publish")) == 1


def test_it_ends_at_the_explained_variance_aimed_at_and_iteration_1_comes_next(tmp_path: Path) -> None:
    given = [*VAPO, "algo.value_pretrain.steps=50", "algo.value_pretrain.stop_at_explained_variance=0.3"]
    with World(reward=reward_letter).open_trainer(tmp_path, [*given, "train.num_iterations=1"]) as trainer:
        assert trainer.run().num_iterations == 1
    lines = load_metrics(tmp_path / "metrics.jsonl")
    *before, last = [line for line in lines[1:] if line["iteration"] <= 0]
    assert max(line["critic/explained_variance"] for line in before) < 0.3 <= last["critic/explained_variance"]
    assert [line["iteration"] for line in lines] == [*range(-50, -50 + len(before) + 1), 0, 1]
    assert len(before) < 49


def test_samples_and_minutes_limit_it_too_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    given = [*VAPO, STEPS, "train.num_iterations=1"]
    limited = World().run_job(tmp_path / "run", [*given, "train.max_samples=72"])
    assert (limited.num_iterations, limited.limit.key) == (0, "train.max_samples")
    assert load_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["iteration"] == -5
    World().run_job(tmp_path / "run", given)
    World().run_job(tmp_path / "whole", given)
    assert summarize(tmp_path / "run")[1:] == summarize(tmp_path / "whole")[1:]


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("online")
    summary = World(reward=reward_letter).run_job(run_dir, ALONE)
    assert summary.num_iterations == 0
    assert summary.heldout_reward == load_metrics(run_dir / "metrics.jsonl")[-1]["reward/heldout"]
    return run_dir


@pytest.mark.parametrize("is_online", [True, False])
@pytest.mark.parametrize("end", [Killed, stop])
@pytest.mark.parametrize("save_every", [1, 3])
def test_one_that_is_killed_or_stopped_goes_on_to_the_same_end(
    save_every: int, end: Callable[[], Any], is_online: bool, rollouts: Path, run_dir: Path
) -> None:
    """From saved rollouts it gives what it gives from fresh ones; nothing but the critic runs then."""
    given = [*ALONE[:3], *ALONE[-2:], f"checkpoint.save_every={save_every}"]
    given += [] if is_online else [f"algo.value_pretrain.rollouts={rollouts}/rollouts.jsonl"]
    with pytest.raises(Killed if end is Killed else Stopped), stopping_on_signals():
        World(Disturbance(end, "critic", "update", 5).watch, reward=reward_letter).run_job(run_dir, given)
    latest = {(1, Killed): -4, (3, Killed): -6}.get((save_every, end), -3)
    assert (run_dir / "checkpoints" / "latest").read_text() == f"iteration-{latest:06}\n"
    world = World(reward=reward_letter)
    world.run_job(run_dir, given)
    assert sum(each == ("critic", "update") for each in world.log) == -latest
    assert {role for role, _ in world.log} == {"critic", *(("policy", "servers") if is_online else ())}
    assert summarize(run_dir)[:2] == summarize(rollouts)[:2]


def summarize(run_dir: Path) -> tuple[bytes, list[tuple[float, float]], list[float]]:
    """The critic; its curve; the iterations."""
    lines = load_metrics(run_dir / "metrics.jsonl")
    curve = [(line["critic/explained_variance"], line["critic/loss"]) for line in lines if "critic/loss" in line]
    return (run_dir / "critic" / "model.safetensors").read_bytes(), curve, [line["iteration"] for line in lines]


def test_a_critic_that_learned_alone_has_no_policy_to_go_on_with(rollouts: Path, tmp_path: Path) -> None:
    given = [*VAPO[:-1], STEPS, f"algo.value_pretrain.rollouts={rollouts}/rollouts.jsonl"]
    World().run_job(tmp_path, [*given, "train.num_iterations=0"])
    assert not (tmp_path / "policy").exists()
    with pytest.raises(CheckpointError, match=r"has no policy.*critic\.init=\S*/critic algo\.value_pretrain\.enabled"):
        World().run_job(tmp_path, [*given, "train.num_iterations=1"])


FROZEN = (
    *("algo=ppo", "critic.optimizer.lr=0.1", "train.num_iterations=4", "train.eval_every=4"),
    *("policy.frozen_iterations=2", "policy.optimizer.decay=linear", "policy.optimizer.decay_iterations=4"),
    *("policy.optimizer.min_lr=0", "policy.optimizer.warmup_steps=0", "critic.optimizer.warmup_steps=0"),
    "logger.save_rollouts=true",
)


def read_versions(run_dir: Path) -> dict[int, tuple[int, set[int]]]:
    """Of each iteration: the trainer's version, and those of the tokens."""
    found: dict[int, tuple[int, set[int]]] = {}
    for line in (run_dir / "rollouts.jsonl").read_text().splitlines():
        record = json.loads(line)
        tokens = found.setdefault(record["iteration"], (record["weight_version"], set()))[1]
        tokens.update(record["response"]["weight_versions"])
    return found


def test_in_frozen_iterations_the_critic_alone_learns(tmp_path: Path) -> None:
    world = World()
    with world.open_trainer(tmp_path, FROZEN) as trainer:
        policy, critic = trainer.roles.policy, trainer.roles.critic
        start = policy.copy_weights()
        for iteration in (1, 2):
            trainer.publish_and_evaluate()
            before = critic.copy_weights()
            trainer.train(iteration)
            assert all(torch.equal(x, start[name]) for name, x in policy.copy_weights().items())
            assert not any(torch.equal(x, before[name]) for name, x in critic.copy_weights().items())
        trainer.run()
        assert trainer.components.sync.published == [0, 1, 2]
        assert not any(torch.equal(x, start[name]) for name, x in policy.copy_weights().items())
    lines = load_metrics(tmp_path / "metrics.jsonl")
    # 2 minibatches, 8 steps of decay from 0.1: the frozen iterations do not count.
    assert [line.get("policy/lr") for line in lines] == [None, None, None, *map(pytest.approx, (0.08125, 0.05625))]
    assert all(line["critic/loss"] > 0 for line in lines[1:])
    assert ["sync/bytes" in line for line in lines] == [True, False, False, True, True]
    assert read_versions(tmp_path) == {1: (0, {0}), 2: (0, {0}), 3: (0, {0}), 4: (1, {1})}


def test_responses_ahead_do_not_become_stale_while_the_policy_is_frozen(tmp_path: Path) -> None:
    given = ["rollout.max_staleness=2", "algo.mismatch.correction=tis", "train.num_iterations=6"]
    with World().open_trainer(tmp_path, [*FROZEN, *given, "policy.frozen_iterations=4"]) as trainer:
        trainer.run()
    lines = load_metrics(tmp_path / "metrics.jsonl")
    assert [line["rollout/staleness_max"] for line in lines[1:6]] == [0, 0, 0, 0, 0]
    assert all(max(tokens) <= version for version, tokens in read_versions(tmp_path).values())


def test_a_return_outside_of_the_range_of_values_is_warned_of(tmp_path: Path) -> None:
    world = World(reward=lambda _prompt, response: Score(2.0 if len(response) > 1 else 0.0, False))
    with world.open_trainer(tmp_path, [*FROZEN, "critic.value_range=[0,1]"]) as trainer:
        trainer.publish_and_evaluate()
        with pytest.warns(RuntimeWarning, match=r"critic\.value_range: found \[0, 1\] and returns from"):
            trainer.train(1)


def test_it_ends_where_the_fitted_rise_is_smaller_than_asked_for_by_more_than_its_error():
    settings = ValuePretrainConfig(enabled=True, steps=9, patience=4, min_improvement=0.1)
    # 0.1, 0.3, 0.2, 0.4 rise by 0.08 a step on the line 0.13 + 0.08 t, 0.32 in 4 steps; residuals -0.03, 0.09, -0.09,
    # 0.03: sqrt(0.018 / 2 / 5) = 0.0424 a step, 0.170 in 4.
    assert fit_rise([0.1, 0.3, 0.2, 0.4]) == pytest.approx((0.32, 4 * (0.018 / 2 / 5) ** 0.5))
    assert find_end(settings, [0.1, 0.3, 0.2, 0.4]) is None
    # No noise: 0.01 a step are 0.04 in 4 steps. Fewer than 4 steps say nothing.
    assert find_end(settings, [0.3, 0.31, 0.32]) is None
    found = find_end(settings, [0.1, 0.3, 0.31, 0.32, 0.33])
    assert found == "explained variance has risen by 0.040 +- 0.000 in the last 4 (min 0.1)"
    # Level, but too noisy to tell: 0 +- 0.36.
    assert find_end(settings, [0.3, 0.1, 0.1, 0.3]) is None
    assert find_end(ValuePretrainConfig(enabled=True, steps=100, patience=None), [0.3] * 99) is None
    assert find_end(ValuePretrainConfig(enabled=True, steps=2), [0.1, 0.2]) == "algo.value_pretrain.steps=2 are done"
    aimed = ValuePretrainConfig(enabled=True, patience=None, stop_at_explained_variance=0.3)
    assert find_end(aimed, [0.1]) is None
    assert find_end(aimed, [0.1, 0.3]) == "explained variance has reached 0.300 (aimed at: 0.3)"


def simulate_ends(trend: np.ndarray, noise: float, num_runs: int = 300) -> list[int | None]:
    """The step at which each run ends by default; None: none before the last."""
    settings, generator, ends = ValuePretrainConfig(enabled=True, steps=1000), np.random.default_rng(0), []
    for _ in range(num_runs):
        curve = (trend + noise * generator.standard_normal(len(trend))).tolist()
        ends.append(next((n for n in range(1, len(curve)) if find_end(settings, curve[:n])), None))
    return ends


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("rise", [0.004, 0.006, 0.008])
def test_a_steady_rise_under_ordinary_noise_is_not_ended(rise, noise):
    ends = simulate_ends(0.1 + rise * np.arange(50), noise)
    assert sum(end is not None for end in ends) <= 0.03 * len(ends)


@pytest.mark.parametrize(("noise", "least"), [(0.0, 1.0), (0.02, 0.95), (0.05, 0.6)])
def test_a_plateau_is_found(noise, least):
    """A rise of 0.03 a step up to step 15; of 100 steps at most."""
    ends = simulate_ends(0.1 + 0.03 * np.minimum(np.arange(100), 15), noise)
    assert sum(end is not None and end <= 50 for end in ends) >= least * len(ends)
    assert sum(end is not None for end in ends) >= 0.98 * len(ends)
    # Never while it still rises, and for a few steps more.
    assert min(end for end in ends if end is not None) > 20


def test_value_pretraining_has_monte_carlo_returns_and_the_rewards_of_training():
    algo = load_config(["algo=vapo", "algo.kl.in_reward=true", "algo.kl.in_loss=true"]).algo
    pretraining = build_pretraining_algo(algo)
    assert (pretraining.lambda_critic, pretraining.lambda_policy) == (1.0, 1.0)
    assert pretraining.kl.in_reward
    assert not pretraining.kl.in_loss
    assert pretraining.reward_norm == algo.reward_norm


GUESS = ("data=guess", "reward=exact", "data.prompt_length=8", "model.random.alphabet=abcdef1234567-|")
TEXT = "data.critic_prompt='{answer}|'"
"""Its first token is the number that every prompt (1-7) hides; no prompt has its last one"""
EIGHT = (*VAPO[:3], "algo.value_pretrain.steps=8")


def reward_number(prompt: Prompt, _response: Response) -> Score:
    """Nobody who has not read the number can say what it will be."""
    return Score(float(prompt.answer in "123"), prompt.answer in "123")


def split(sequences: Sequences) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(prompt, response) of each row."""
    rows = sequences.tokens.split(sequences.lengths.tolist())
    return [
        (tuple(row[:n].tolist()), tuple(row[n:].tolist()))
        for row, n in zip(rows, sequences.prompt_lengths.tolist(), strict=True)
    ]


def pretrain_on_guesses(tmp_path: Path, overrides: Sequence[str]) -> tuple[dict[str, torch.Tensor], float]:
    """The critic's weights after value pretraining, and its last explained variance."""
    with World(reward=reward_number).open_trainer(tmp_path, [*GUESS, *EIGHT, *overrides]) as trainer:
        curve = pretrain(trainer)
        return trainer.roles.critic.copy_weights(), curve[-1]


def test_a_critic_that_reads_the_answer_explains_what_the_prompts_do_not_tell(tmp_path: Path, said: Said) -> None:
    assert pretrain_on_guesses(tmp_path / "with", [TEXT, "logger.terminal=true"])[1] > 0.3
    assert "explains nothing" not in said()
    assert pretrain_on_guesses(tmp_path / "without", ["algo.value_pretrain.steps=2", "logger.terminal=true"])[1] < 0.1
    assert "the critic explains nothing after value pretraining" in said()


def test_from_saved_rollouts_the_critic_reads_the_same_text_as_from_fresh_ones(tmp_path: Path) -> None:
    expected, _ = pretrain_on_guesses(tmp_path, [TEXT, "logger.save_rollouts=true"])
    reads_reward = ("reward=", "reward.")
    given = [*(text for text in GUESS if not text.startswith(reads_reward)), *EIGHT, TEXT, "train.num_iterations=0"]
    given.append(f"algo.value_pretrain.rollouts={tmp_path}/rollouts.jsonl")
    World().run_job(tmp_path / "offline", given)
    found = load_file(tmp_path / "offline" / "critic" / "model.safetensors")
    assert all(torch.equal(x, expected[name]) for name, x in found.items())


STALE = ("rollout.max_staleness=2", "algo.dynamic_sampling.enabled=true", "algo.mismatch.correction=tis")


@pytest.mark.parametrize("further", [(), STALE])
def test_policy_reference_servers_and_journal_never_hold_a_token_of_it(
    further: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [*RUN, *GUESS, TEXT, "algo.kl.in_loss=true", "train.num_iterations=2", *further]
    _, inputs = load(overrides)
    prompts = {prompt.token_ids for prompt in inputs.data.train}
    mark = inputs.tokenizer.convert_tokens_to_ids("|")
    journaled: list[Prompt] = []
    save = Journal.save

    def note(journal: Journal, key: str, samples: Any) -> None:
        journaled.extend(sample.prompt for sample in samples)
        save(journal, key, samples)

    seen: dict[tuple[str, str], list[Sequences]] = {}

    def watch_given(verb: str, stock: Any) -> Callable[..., Any]:
        def call(backend: FakeBackend, given: Sequences | TrainingSamples, *args: Any) -> Any:
            sequences = given if isinstance(given, Sequences) else given.sequences
            assert sequences is given or given.critic_sequences is None
            seen.setdefault((backend.role, verb), []).append(sequences)
            return stock(backend, given, *args)

        return call

    monkeypatch.setattr(Journal, "save", note)
    for verb in ("logprobs", "values", "update"):
        monkeypatch.setattr(FakeBackend, verb, watch_given(verb, getattr(FakeBackend, verb)))
    world = World()
    world.run_job(tmp_path, overrides)
    assert mark not in {token for prompt in prompts for token in prompt}
    for role, verb in (("policy", "logprobs"), ("policy", "update"), ("reference", "logprobs")):
        assert {prompt for each in seen[role, verb] for prompt, _ in split(each)} <= prompts
    asked = {prompt for _, asked in world.components[0].engine.asked for prompt in asked}
    assert asked <= prompts
    assert {prompt.token_ids for prompt in journaled} <= prompts
    assert "|" not in {text for prompt in journaled for text in prompt.text}
    text = inputs.critic_prompt
    assert text is not None
    expected = {text.extend(prompt) for prompt in inputs.data.train}
    for verb in ("values", "update"):
        found = {prompt for each in seen["critic", verb] for prompt, _ in split(each)}
        assert found <= expected
        assert len(found) > 3
        assert all(prompt[1] == mark for prompt in found)
    last = [split(seen[role, "update"][-1]) for role in ("policy", "critic")]
    assert [response for _, response in last[0]] == [response for _, response in last[1]]
