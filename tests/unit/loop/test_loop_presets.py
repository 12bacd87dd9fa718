"""The loop under every preset, over the fakes of its interfaces (tests/fakes)."""

from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.disturbed import add_engine_noise
from fakes.run import World, reward_length
from generation import build_collector

from megarl.algo.blocks import NonFiniteError
from megarl.algo.registry import needs_critic
from megarl.config.load import list_options
from megarl.config.schema.algo import needs_reference
from megarl.report.metrics import load_metrics
from megarl.rollout.rollout_file import load_rollouts
from megarl.rollout.source import NoSignalError
from megarl.task.data import PromptSampler
from megarl.task.scorer import Scorer
from megarl.trainer import Trainer
from megarl.types import Experience, Metrics, Prompt, Response, RewardFunction, Rollout, Score

CRITICS = ("ppo", "vc_ppo", "vapo", "sao", "bpco")
PRETRAINED = ("vc_ppo", "vapo", "sao")
FROZEN = ("sao", "bpco")
OF_ROLLOUT = ("sao", "bpco")
WITH_KL = ("reinforce_pp", "reinforce_pp_baseline", "rloo", "grpo")
ONE_STEP = "train.num_minibatches=1"
TWO_ITERATIONS = ("train.num_iterations=2", "train.eval_every=2")


def set_reward(trainer: Trainer, reward: RewardFunction) -> None:
    """Another verdict on the same responses."""
    trainer.components.collector._scorer = Scorer(reward)


@pytest.mark.parametrize("algo", list_options("algo"))
def test_every_preset_trains_with_the_roles_it_needs_and_no_other(algo: str, tmp_path: Path) -> None:
    world = World()
    before_it = ["algo.value_pretrain.steps=0"] if algo in PRETRAINED else []
    before_it += ["policy.frozen_iterations=0"] if algo in FROZEN else []
    with world.open_trainer(tmp_path, [f"algo={algo}", ONE_STEP, *TWO_ITERATIONS, *before_it]) as trainer:
        components, config = trainer.components, trainer.config.algo
        assert (components.critic is not None) == needs_critic(config) == (algo in CRITICS)
        assert (components.reference is not None) == needs_reference(config) == (algo in WITH_KL)
        before = components.policy.copy_weights()
        assert trainer.run().num_iterations == 2
        after = components.policy.copy_weights()
    assert not any(torch.equal(after[name], before[name]) for name in before)
    lines = load_metrics(tmp_path / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [0, 1, 2]
    assert all(isfinite(line["policy/loss"]) and line["policy/grad_norm"] > 0 for line in lines[1:])
    assert all(("kl/mean" in line) == (algo in WITH_KL) for line in lines[1:])
    assert all(("critic/loss" in line) == (algo in CRITICS) for line in lines[1:])
    # The servers have the trainer's weights in every iteration.
    assert all(("mismatch/kl" in line) == (algo not in OF_ROLLOUT) for line in lines[1:])
    assert all(abs(line.get("mismatch/kl", line["policy/approx_kl"])) < 1e-6 for line in lines[1:])
    order = [each for each in world.log if each[0] == "servers" or each[1] == "update"]
    updates = [("critic", "update")] * (algo in CRITICS) + [("policy", "update")]
    assert order == [("servers", "publish"), *[*updates, ("servers", "publish")] * 2]


def test_ratios_leave_1_from_the_second_minibatch_on(tmp_path: Path) -> None:
    with World().open_trainer(tmp_path, ["algo=grpo", *TWO_ITERATIONS]) as trainer:
        trainer.run()
    lines = load_metrics(tmp_path / "metrics.jsonl")[1:]
    assert all(line["policy/ratio_max"] > 1.01 for line in lines)


def test_the_last_evaluation_is_the_summary_and_is_of_the_last_weights(tmp_path: Path) -> None:
    with World().open_trainer(tmp_path, ["algo=grpo", "train.num_iterations=3", "train.eval_every=2"]) as trainer:
        summary = trainer.run()
        assert trainer.version == summary.num_iterations == 3
        again = trainer.components.collector.collect_greedy(trainer.components.heldout, weight_version=3)
    rewards = [sample.score.reward for sample in again.samples]
    assert summary.heldout_reward == pytest.approx(sum(rewards) / len(rewards))
    lines = load_metrics(tmp_path / "metrics.jsonl")
    assert [line["iteration"] for line in lines if "reward/heldout" in line] == [0, 2, 3]
    assert lines[3]["reward/heldout"] == summary.heldout_reward


def test_a_rollout_has_whole_groups_in_order_and_none_of_the_heldout_prompts(tmp_path: Path) -> None:
    with World().open_trainer(tmp_path, ["algo=grpo"]) as trainer:
        trainer.fleet.publish(0)
        rollout, _ = trainer.source.take(1)
        heldout = {prompt.id for prompt in trainer.components.heldout}
        expected = [p.id for p in PromptSampler(trainer.components.sampler._prompts, trainer.config.seed).next_batch(6)]
    samples = rollout.samples
    assert [s.group for s in samples] == [g for g in range(6) for _ in range(4)]
    assert [s.prompt.id for s in samples] == [id for id in expected for _ in range(4)]
    assert not heldout & set(expected)


def test_every_sampled_rollout_is_in_the_file_bit_by_bit(tmp_path: Path) -> None:
    with World().open_trainer(tmp_path, ["algo=grpo", "logger.save_rollouts=true"]) as trainer:
        trainer.fleet.publish(0)
        taken = [trainer.source.take(iteration)[0] for iteration in (1, 2)]
    assert list(load_rollouts(tmp_path / "rollouts.jsonl")) == taken


def test_scores_are_logged_evaluated_and_saved_and_their_scaled_rewards_learned_from(tmp_path: Path) -> None:
    """The same responses under reward.wrong=0 and -1 (the first iteration has the same weights)."""
    lines, saved = [], []
    for wrong in (0, -1):
        run_dir = tmp_path / str(wrong)
        given = ["algo=reinforce_pp", "train.num_iterations=1", f"reward.wrong={wrong}", "logger.save_rollouts=true"]
        with World().open_trainer(run_dir, [*given, "algo.whiten_advantages=false"]) as trainer:
            trainer.run()
        lines.append(load_metrics(run_dir / "metrics.jsonl"))
        saved.append(list(load_rollouts(run_dir / "rollouts.jsonl")))
    assert saved[0] == saved[1]
    (start, first), (scaled_start, scaled) = lines
    assert scaled_start["reward/heldout"] == start["reward/heldout"]
    for name in ("mean", "min", "max", "std", "correct", "positive_frac"):
        assert scaled[f"reward/{name}"] == first[f"reward/{name}"]
    assert scaled["reward/shaped_mean"] == pytest.approx(2 * first["reward/shaped_mean"] - 1)
    assert scaled["advantage/mean"] != pytest.approx(first["advantage/mean"])


def test_the_critic_takes_its_own_number_of_passes_and_both_roles_every_epoch(tmp_path: Path) -> None:
    """Seen in the learning rates, which fall by a step at every optimizer step."""
    schedule = ["lr=0.1", "min_lr=0", "decay=linear", "decay_steps=10"]
    given = [
        *[f"{role}.optimizer.{text}" for role in ("policy", "critic") for text in schedule],
        *("train.epochs_per_iteration=2", "critic.updates_per_policy_update=2"),
    ]
    with World().open_trainer(tmp_path, ["algo=ppo", *given]) as trainer:
        trainer.fleet.publish(0)
        trainer.train(1)
        metrics = trainer.state.metrics
    # 2 minibatches x 2 epochs: the mean of 0.09 ... 0.06; the critic's 8 steps: of 0.09 ... 0.02.
    assert metrics["policy/lr"] == pytest.approx(0.075)
    assert metrics["critic/lr"] == pytest.approx(0.055)


def test_dynamic_sampling_trains_on_groups_of_right_and_wrong_responses_only(tmp_path: Path) -> None:
    def reward(prompt: Prompt, response: Response) -> Score:
        # Half of the letters are always right, of other lengths: with by=correct their groups carry no signal.
        score = reward_length(prompt, response)
        return replace(score, correct=True) if prompt.text[0] in "abc" else score

    with World().open_trainer(tmp_path, ["algo=dapo", "algo.dynamic_sampling.by=correct"]) as trainer:
        set_reward(trainer, reward)
        trainer.fleet.publish(0)
        rollout, metrics = trainer.source.take(1)
        assert {s.prompt.text[0] for s in rollout.samples} <= {"d", "e", "f"}
        assert len(rollout.samples) == 24
        assert metrics["sampling/rounds"] > 1
        assert metrics["sampling/total_samples"] == trainer.source.num_samples == 4 * metrics["sampling/num_prompts"]
        set_reward(trainer, lambda _prompt, _response: Score(1.0, True))
        with pytest.raises(NoSignalError, match="too easy"):
            trainer.source.take(2)


def test_a_step_without_a_signal_is_said_in_its_iteration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where all rewards are equal Adam makes a full step of the rounding in the KL's gradient."""

    def give_half(_prompt: Prompt, _response: Response) -> Score:
        return Score(0.5, False)

    given = ["algo=grpo", "train.num_iterations=1", "logger.terminal=true"]
    with World(reward=give_half).open_trainer(tmp_path / "equal", given) as trainer:
        trainer.run()
    assert "every advantage of this iteration is 0" in " ".join(capsys.readouterr().out.split())
    with World().open_trainer(tmp_path / "differ", given) as trainer:
        trainer.run()
    assert "every advantage" not in " ".join(capsys.readouterr().out.split())


REPLAY = ("algo=topr", "algo.replay.num_iterations=2", "algo.replay.frac=0.5", ONE_STEP, "train.num_iterations=4")


def test_replayed_samples_are_of_the_policy_that_sampled_them(tmp_path: Path) -> None:
    """mu is the trainer's own log-prob: now for fresh samples, in their first iteration for replayed ones."""
    with World().open_trainer(tmp_path, REPLAY) as trainer:
        add_engine_noise(trainer, 0.3)
        trainer.fleet.publish(0)
        first: dict[tuple[str, tuple[int, ...]], list[float]] = {}
        for iteration in (1, 2, 3):
            rollout, _ = trainer.source.take(iteration)
            experience, _ = trainer.roles.score(rollout, 1)
            trainer.source.keep_logprobs(experience.old_logprobs)
            assert (experience.ages == 0).tolist() == [True] * 12 + [iteration == 1] * 12
            for sample, row, mu, own, mask in zip(
                rollout.samples,
                experience.old_logprobs.tolist(),
                experience.sampling_logprobs.tolist(),
                experience.scored,
                experience.mask,
                strict=True,
            ):
                key = (sample.prompt.id, tuple(sample.response.token_ids.tolist()))
                if sample.age == 0:
                    first.setdefault(key, row)
                length = len(sample.response.token_ids)
                assert torch.equal(own, mask)
                assert mu[:length] == first[key][:length]
            fresh, old = experience.ages == 0, experience.ages > 0
            gap = (experience.old_logprobs - experience.sampling_logprobs).abs()
            assert gap[fresh].max() == 0
            assert iteration == 1 or gap[old][experience.mask[old]].max() > 1e-3
            samples, metrics = trainer.algorithm.build_targets(experience, 1)
            assert metrics.get("replay/frac", 0.0) == (0.0 if iteration == 1 else 0.5)
            assert metrics["mismatch/logprob_gap_mean"] == pytest.approx(0.3, abs=1e-4)
            update = trainer.roles.update(samples, iteration)
            assert iteration > 1 or update["topr/taper_mean"] == pytest.approx(1.0, abs=1e-4)
            trainer.fleet.publish(iteration)


def test_what_was_drawn_ahead_of_its_first_iteration_has_the_logprobs_of_that_iteration(tmp_path: Path) -> None:
    with World().open_trainer(tmp_path, [*REPLAY, "rollout.max_staleness=1"]) as trainer:
        first: dict[tuple[str, tuple[int, ...]], tuple[float, ...]] = {}
        num_replayed = 0
        build = trainer.roles.score

        def build_noting(rollout: Rollout, *args: Any, **keys: Any) -> tuple[Experience, Metrics]:
            nonlocal num_replayed
            experience, metrics = build(rollout, *args, **keys)
            for sample, row in zip(rollout.samples, experience.old_logprobs.tolist(), strict=True):
                key = (sample.prompt.id, tuple(sample.response.token_ids.tolist()))
                if sample.age == 0:
                    first.setdefault(key, tuple(row[: len(key[1])]))
                else:
                    assert tuple(sample.first_old_logprobs.tolist()) == first[key]
                    num_replayed += 1
            return experience, metrics

        trainer.roles.score = build_noting  # type: ignore[method-assign]
        trainer.run()
    assert num_replayed == 3 * 12


def test_the_rollout_engines_noise_changes_nothing_that_topr_learns(tmp_path: Path) -> None:
    weights = []
    for noise in (0.0, 0.3):
        with World().open_trainer(tmp_path / str(noise), REPLAY) as trainer:
            add_engine_noise(trainer, noise)
            trainer.run()
            weights.append(trainer.components.policy.copy_weights())
        lines = load_metrics(tmp_path / str(noise) / "metrics.jsonl")[1:]
        assert all(0 < line["topr/taper_mean"] <= 1 for line in lines)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_kl_over_the_whole_vocabulary_is_zero_at_first_and_grows_with_the_updates(tmp_path: Path) -> None:
    full = ["algo.kl.reward_estimator=full", "algo.kl.in_loss=true", "algo.kl.loss_estimator=full"]
    with World().open_trainer(tmp_path, ["algo=reinforce_pp", *full, *TWO_ITERATIONS]) as trainer:
        assert trainer.components.reference is None  # The policy holds it itself.
        trainer.run()
    first, second = load_metrics(tmp_path / "metrics.jsonl")[1:]
    assert first["kl/mean"] == pytest.approx(0, abs=1e-7)
    assert second["kl/mean"] > 1e-3
    assert first["policy/kl_loss"] > 0


def test_the_kl_of_the_reward_is_to_the_policy_of_the_start(tmp_path: Path) -> None:
    with World().open_trainer(tmp_path, ["algo=reinforce_pp", "train.num_iterations=3"]) as trainer:
        trainer.run()
    kl = [line["kl/mean"] for line in load_metrics(tmp_path / "metrics.jsonl")[1:]]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[1] != pytest.approx(0, abs=1e-4)
    assert kl[2] != pytest.approx(kl[1], abs=1e-4)


def test_a_run_ends_at_the_heldout_reward_it_aims_at(tmp_path: Path) -> None:
    given = ["algo=grpo", "train.num_iterations=50", "train.eval_every=1", "train.stop_at_heldout_reward=0.5"]
    with World().open_trainer(tmp_path, given) as trainer:
        rewards = iter([0.0] * (8 + 24 + 8) + [1.0] * 1000)
        set_reward(trainer, lambda _prompt, _response: Score(next(rewards), False))
        assert trainer.run().num_iterations == 2


def test_another_seed_of_the_run_draws_and_samples_others_and_the_same_repeats(tmp_path: Path) -> None:
    def run(name: str, seed: int) -> tuple[list[dict[str, float]], list[str]]:
        world = World()
        with world.open_trainer(tmp_path / name, ["algo=grpo", *TWO_ITERATIONS, f"seed={seed}"]) as trainer:
            trainer.run()
        lines = load_metrics(tmp_path / name / "metrics.jsonl")
        keys = [key for key, _ in world.components[0].engine.asked]
        return [{k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))} for line in lines], keys

    first, again, other = run("a", 1), run("b", 1), run("c", 2)
    assert first == again
    assert first[0] != other[0]
    assert first[1] == ["evaluation-0", "iteration-1/round-1", "iteration-2/round-1", "evaluation-2"]


def test_values_that_are_not_finite_end_the_run(tmp_path: Path) -> None:
    with World().open_trainer(tmp_path, ["algo=ppo"]) as trainer:
        with torch.no_grad():
            trainer.components.critic.model.before.fill_(torch.inf)
        with pytest.raises(NonFiniteError, match="values"):
            trainer.run()


def test_responses_of_other_weights_than_the_trainers_end_the_run(tmp_path: Path) -> None:
    with World().open_trainer(tmp_path, ["algo=grpo"]) as trainer:
        trainer.fleet.publish(0)
        trainer.train(1)
        trainer.fleet.version = trainer.iteration
        with pytest.raises(
            RuntimeError, match="weight version 0; the trainer's is 1: the servers missed a weight sync"
        ):
            trainer.source.take(2)


def test_the_collector_scores_under_the_key_it_was_asked_with(tmp_path: Path) -> None:
    with World().open_trainer(tmp_path, ["algo=grpo"]) as trainer:
        trainer.fleet.publish(0)
        collector = build_collector(trainer.components.engine, scorer=Scorer(reward_length))
        prompts = trainer.components.sampler.next_batch(3)
        first, same, other = (collector.sample(prompts, 4, key=key) for key in ("a", "a", "b"))
    assert first == same != other
