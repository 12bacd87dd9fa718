"""The loop under every preset, what it scores and what it writes, and train.eval_sets: further sets, each with its own
sampling, evaluated with the held-out prompts; over the fakes of its interfaces (tests/fakes).
"""

import json
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from data_cases import build_byte_tokenizer
from fakes.backend import FakeBackend
from fakes.disturbed import add_engine_noise
from fakes.run import World, load_untimed, reward_length
from fakes.run import load as load_run
from generation import load_rollouts
from metric_table import find_metric
from torch import Tensor

from megarl.algo.objective import needs_critic, reuses_logprobs
from megarl.algo.statistics import NonFiniteError
from megarl.config.errors import ConfigError
from megarl.config.load import list_options, load_config
from megarl.config.schema.algo import needs_reference
from megarl.interfaces import Sampling, Truncation
from megarl.mcore.spec import Role
from megarl.report.record import load_metrics
from megarl.rollout.collector import EvalSet
from megarl.rollout.source import NoSignalError
from megarl.run.components import join_samples, strip_for_replay
from megarl.run.inputs import build_eval_sets
from megarl.task.data import PromptSampler
from megarl.task.scorer import Scorer
from megarl.trainer import Trainer
from megarl.types import (
    Experience,
    Metrics,
    Prompt,
    Response,
    RewardFunction,
    Rollout,
    Score,
    Sequences,
    TrainingSamples,
)

CRITICS = ("ppo", "vc_ppo", "vapo", "sao", "bpco", "cv_ppo")
PRETRAINED = ("vc_ppo", "vapo", "sao")
FROZEN = ("sao", "bpco")
OF_ROLLOUT = ("sao", "bpco")
WITH_KL = ("reinforce_pp", "reinforce_pp_baseline", "rloo", "grpo", "distill")
ONE_STEP = "train.num_minibatches=1"
TWO_ITERATIONS = ("train.num_iterations=2", "train.eval_every=2")


def set_reward(trainer: Trainer, reward: RewardFunction) -> None:
    """Another verdict on the same responses."""
    trainer.components.collector.scorer = Scorer(reward)


@pytest.mark.parametrize("algo", list_options("algo"))
def test_every_preset_trains_with_the_roles_it_needs_and_no_other(algo: str, tmp_path: Path) -> None:
    world = World()
    before_it = ["algo.value_pretrain.steps=0"] if algo in PRETRAINED else []
    before_it += ["policy.frozen_iterations=0"] if algo in FROZEN else []
    with world.open_trainer(tmp_path, [f"algo={algo}", ONE_STEP, *TWO_ITERATIONS, *before_it]) as trainer:
        components, config = trainer.roles, trainer.config.algo
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


def test_the_last_evaluation_is_the_summary_and_is_of_the_last_weights(tmp_path: Path) -> None:
    with World().open_trainer(tmp_path, ["algo=grpo", "train.num_iterations=3", "train.eval_every=2"]) as trainer:
        summary = trainer.run()
        assert trainer.fleet.version == summary.num_iterations == 3
        again = trainer.components.collector.evaluate(trainer.fleet.heldout, weight_version=3, key="k")[0]
    rewards = [sample.score.reward for sample in again.samples]
    assert summary.heldout_reward == pytest.approx(sum(rewards) / len(rewards))
    lines = load_metrics(tmp_path / "metrics.jsonl")
    assert [line["iteration"] for line in lines if "reward/heldout" in line] == [0, 2, 3]
    assert lines[3]["reward/heldout"] == summary.heldout_reward
    # From the second of its two minibatches on the policy is no longer the one that sampled.
    assert all(line["policy/ratio_max"] > 1.01 for line in lines[1:])


def test_a_rollout_has_whole_groups_in_order_and_none_of_the_heldout_prompts_and_is_in_the_file(tmp_path: Path) -> None:
    with World().open_trainer(tmp_path, ["algo=grpo", "logger.save_rollouts=true"]) as trainer:
        trainer.fleet.publish(0)
        taken = [trainer.source.take(iteration)[0] for iteration in (1, 2)]
        heldout = {prompt.id for prompt in trainer.fleet.heldout}
        expected = [
            p.id for p in PromptSampler(trainer.components.inputs.data.train, trainer.config.seed).next_batch(6)
        ]
    samples = taken[0].samples
    assert [s.group for s in samples] == [g for g in range(6) for _ in range(4)]
    assert [s.prompt.id for s in samples] == [id for id in expected for _ in range(4)]
    assert not heldout & set(expected)
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


def test_a_critic_that_replays_learns_its_last_iterations_again_with_the_returns_that_they_had(tmp_path: Path) -> None:
    given = ["algo=ppo", "algo.lambda_critic=1", "critic.replay_iterations=2", "train.num_iterations=4"]
    seen: dict[str, list[tuple[TrainingSamples, list[Tensor]]]] = {"policy": [], "critic": []}
    with World().open_trainer(tmp_path, given) as trainer:
        for name, backend in (("policy", trainer.roles.policy), ("critic", trainer.roles.critic)):

            def update(samples: Any, minibatches: Any, name: str = name, stock: Any = backend.update) -> Any:
                seen[name].append((samples, minibatches))
                return stock(samples, minibatches)

            backend.update = update
        trainer.run()
    fresh = [trainer_samples for trainer_samples, _ in seen["policy"]]
    for n, (samples, minibatches) in enumerate(seen["critic"]):
        parts = fresh[max(n - 2, 0) : n + 1][::-1]
        assert samples.sequences.tokens.tolist() == [x for part in parts for x in part.sequences.tokens.tolist()]
        assert sorted(torch.cat(minibatches).tolist()) == list(range(24 * len(parts)))
        for own, rows in zip(seen["policy"][n][1], minibatches, strict=True):
            assert rows[:12].tolist() == own.tolist()
            assert [(rows // 24 == age).sum() for age in range(len(parts))] == [12] * len(parts)
        # The newest part is what this iteration gave, the others what theirs did.
        start = 0
        for part, (then, _) in zip(parts, seen["critic"][n::-1], strict=False):
            width = part.mask.shape[1]
            assert torch.equal(samples.returns[start : start + 24, :width], then.returns[:24, :width])
            assert torch.equal(samples.mask[start : start + 24, :width], part.mask)
            assert not samples.mask[start : start + 24, width:].any()
            start += 24


def test_the_critics_loss_of_joined_samples_is_that_of_all_their_tokens() -> None:
    def build(lengths: list[int], values: list[float]) -> TrainingSamples:
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        returns, n = torch.tensor(values)[:, None] * mask, len(lengths)
        prompts = torch.ones(n, dtype=torch.int64)
        total = torch.tensor(lengths) + 1
        sequences = Sequences(torch.arange(int(total.sum())), total, prompts)
        unused = dict.fromkeys(("old_logprobs", "sampling_logprobs", "ref_logprobs"))
        zeros = torch.zeros(mask.shape)
        given = {"advantages": zeros, "rollout_logprobs": zeros, "old_values": zeros, "returns": returns}
        return TrainingSamples(sequences, mask, mask, torch.ones(n, dtype=torch.bool), **given, **unused)

    joined = join_samples([strip_for_replay(build([2, 1], [1.0, 2.0])), strip_for_replay(build([3], [4.0]))])
    # Values 0: (2 * 1 + 1 * 4 + 3 * 16) / 2 / 6 tokens.
    spec = load_run(["algo=ppo"])[1].specs[Role.critic]
    assert FakeBackend(spec)._compute_loss(joined).loss.item() == pytest.approx(54 / 12)
    assert joined.sequences.select(torch.tensor([2])).tokens.tolist() == [0, 1, 2, 3]


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


def test_the_critics_value_of_a_prompt_alone_is_that_before_the_response_and_decides_which_prompts_are_asked(tmp_path):
    range_ = ("algo.dynamic_sampling.enabled=true", "algo.dynamic_sampling.value_high=100")
    with World().open_trainer(tmp_path, ["algo=ppo", *range_]) as trainer:
        trainer.fleet.publish(0)
        rollout, metrics = trainer.source.take(1)
        experience, _ = trainer.roles.score(rollout, 1)
        found = trainer.source._find_values([sample.prompt for sample in rollout.samples])
        assert found == experience.values[:, 0].tolist()
        assert metrics["sampling/num_outside_value"] == 0
        # No value is above the largest: the prompts with the nearest are asked.
        trainer.source.groups._sampling.value_low = 200.0
        _, metrics = trainer.source.take(2)
        assert metrics["sampling/num_outside_value"] > 0


REPLAY = ("algo=topr", "algo.replay.num_iterations=2", "algo.replay.frac=0.5", ONE_STEP, "train.num_iterations=4")


@pytest.mark.parametrize("staleness", [0, 1])
def test_replayed_samples_are_of_the_policy_that_sampled_them(staleness: int, tmp_path: Path) -> None:
    """mu is the trainer's own log-prob: now for fresh samples, in their first iteration for replayed ones."""
    with World().open_trainer(tmp_path, [*REPLAY, f"rollout.max_staleness={staleness}"]) as trainer:
        add_engine_noise(trainer, 0.3)
        first: dict[tuple[str, tuple[int, ...]], list[float]] = {}
        ages: list[list[int]] = []
        score = trainer.roles.score

        def score_noting(rollout: Rollout, *args: Any, **keys: Any) -> tuple[Experience, Metrics]:
            experience, metrics = score(rollout, *args, **keys)
            ages.append(experience.ages.tolist())
            for row, sample in enumerate(rollout.samples):
                own = experience.old_logprobs[row, : len(sample.response)].tolist()
                key = (sample.prompt.id, tuple(sample.response.token_ids.tolist()))
                if sample.age == 0:
                    first.setdefault(key, own)
                else:
                    assert sample.first_old_logprobs.tolist() == first[key] != own
                if staleness == 0:
                    assert experience.sampling_logprobs[row, : len(own)].tolist() == first[key]
            return experience, metrics

        trainer.roles.score = score_noting  # type: ignore[method-assign]
        trainer.run()
    assert [sum(age == 0 for age in each) for each in ages] == [24, 12, 12, 12]
    lines = load_metrics(tmp_path / "metrics.jsonl")[1:]
    assert [line.get("replay/frac", 0.0) for line in lines] == [0.0, 0.5, 0.5, 0.5]
    if staleness == 0:
        assert [line["mismatch/logprob_gap_mean"] for line in lines] == [pytest.approx(0.3, abs=1e-4)] * 4
        assert lines[0]["topr/taper_mean"] == pytest.approx(1.0, abs=1e-4)


def test_the_rollout_engines_noise_changes_nothing_that_topr_learns(tmp_path: Path) -> None:
    weights = []
    for noise in (0.0, 0.3):
        with World().open_trainer(tmp_path / str(noise), REPLAY) as trainer:
            add_engine_noise(trainer, noise)
            trainer.run()
            weights.append(trainer.roles.policy.copy_weights())
        lines = load_metrics(tmp_path / str(noise) / "metrics.jsonl")[1:]
        assert all(0 < line["topr/taper_mean"] <= 1 for line in lines)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


FULL_KL = ("algo.kl.reward_estimator=full", "algo.kl.in_loss=true", "algo.kl.loss_estimator=full")


@pytest.mark.parametrize("given", [(), FULL_KL])
def test_the_kl_is_to_the_policy_of_the_start(given: tuple[str, ...], tmp_path: Path) -> None:
    with World().open_trainer(tmp_path, ["algo=reinforce_pp", "train.num_iterations=3", *given]) as trainer:
        assert (trainer.roles.reference is None) == bool(given)  # Over the whole vocabulary the policy holds it.
        trainer.run()
    lines = load_metrics(tmp_path / "metrics.jsonl")[1:]
    kl = [line["kl/mean"] for line in lines]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[1] != pytest.approx(0, abs=1e-4)
    assert kl[2] != pytest.approx(kl[1], abs=1e-4)
    assert not given or (kl[1] > 1e-3 and lines[0]["policy/kl_loss"] > 0)


def test_another_seed_of_the_run_draws_and_samples_others_and_the_same_repeats(tmp_path: Path) -> None:
    def run(name: str, seed: int) -> tuple[list[dict[str, float]], list[str]]:
        world = World()
        with world.open_trainer(tmp_path / name, ["algo=grpo", *TWO_ITERATIONS, f"seed={seed}"]) as trainer:
            trainer.run()
        return load_untimed(tmp_path / name), [key for key, _ in world.components[0].engine.asked]

    first, again, other = run("a", 1), run("b", 1), run("c", 2)
    assert first == again
    assert first[0] != other[0]
    assert first[1] == ["evaluation-0", "iteration-1/round-1", "iteration-2/round-1", "evaluation-2"]


def test_values_that_are_not_finite_end_the_run(tmp_path: Path) -> None:
    with World().open_trainer(tmp_path, ["algo=ppo"]) as trainer:
        torch.nn.init.constant_(trainer.roles.critic.model.before, torch.inf)
        with pytest.raises(NonFiniteError, match="values"):
            trainer.run()


@pytest.mark.parametrize("surrogate", ["dis", "dppo"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_without_a_reader_the_policy_does_not_score_and_updates_as_if_it_had(
    surrogate: str, staleness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's log-probs are off by 0.1, which both have in their ratios."""
    given = [f"algo.surrogate={surrogate}", "algo.value_pretrain.steps=0", "train.num_iterations=3"]
    weights, metrics = [], []
    for scored in (False, True):
        if scored:
            for module in ("megarl.run.components", "megarl.algo.objective"):
                monkeypatch.setattr(f"{module}.reads_old_logprobs", lambda _algo: True)
        world = World()
        overrides = ["algo=vapo", *given, f"rollout.max_staleness={staleness}"]
        with world.open_trainer(tmp_path / str(scored), overrides) as trainer:
            add_engine_noise(trainer, 0.1)
            trainer.run()
            weights.append(trainer.roles.policy.copy_weights())
        assert (("policy", "logprobs") in world.log) == scored
        metrics.append(load_metrics(tmp_path / str(scored) / "metrics.jsonl")[1:])
    left_out = {name for line in metrics[1] for name in line} - {name for line in metrics[0] for name in line}
    assert left_out == {name for name in left_out if name.startswith("mismatch/")}
    assert "mismatch/kl" in left_out
    if staleness == 0:  # else the order in which groups are complete is chance's
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
        for name in ("policy/loss", "policy/clip_frac", "policy/grad_norm"):
            assert [line[name] for line in metrics[0]] == [line[name] for line in metrics[1]]


@pytest.mark.parametrize("algo", list_options("algo"))
def test_one_step_with_the_updates_own_logprobs_is_that_with_a_pass_and_logs_the_same(
    algo: str, tmp_path: Path
) -> None:
    given = [f"algo={algo}", "train.num_minibatches=1", "train.num_iterations=2", "train.eval_every=2"]
    given += ["policy.frozen_iterations=0"] if algo in ("bpco", "sao") else []
    weights, metrics, scored = [], [], []
    for reuses in (True, False):
        world, run_dir = World(), tmp_path / str(reuses)
        keys = [*given, f"++train.reuse_logprobs={str(reuses).lower()}"] if not reuses else given
        with world.open_trainer(run_dir, keys) as trainer:
            expected = reuses_logprobs(trainer.config)
            add_engine_noise(trainer, 0.1)
            trainer.run()
            weights.append(trainer.roles.policy.copy_weights())
        assert (("policy", "updated_logprobs") in world.log) == expected
        scored.append(("policy", "logprobs") in world.log)
        metrics.append(load_untimed(run_dir))
    assert scored[0] <= scored[1]
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-6) for name in weights[0])
    for with_own, with_pass in zip(*metrics, strict=True):
        assert with_own == pytest.approx(with_pass, rel=1e-4, abs=1e-5)


RUN = ("algo=vapo", "algo.value_pretrain.enabled=false", "train.num_iterations=2", "train.eval_every=1")


def load(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "tokens.jsonl").read_text().splitlines()]


def test_a_run_writes_what_it_learned_from_and_how_its_update_changed_it(tmp_path: Path) -> None:
    with World().open_trainer(tmp_path, RUN) as trainer:
        given = []
        build_targets = trainer.algorithm.build_targets

        def keep(experience: Any, *args: Any, **keys: Any) -> Any:
            samples, metrics = build_targets(experience, *args, **keys)
            given.append((experience, samples))
            return samples, metrics

        trainer.algorithm.build_targets = keep
        trainer.run()
    lines = load(tmp_path)
    assert [(line["iteration"], line["kind"]) for line in lines] == [
        *([(0, "heldout")] * 8 + [(1, "train")] * 8 + [(1, "heldout")] * 8 + [(2, "train")] * 8 + [(2, "heldout")] * 8)
    ]
    for line in lines:
        if line["kind"] == "heldout":
            continue
        experience, samples = given[line["iteration"] - 1]
        row, num = line["sample"], line["num_tokens"]
        expected = {
            "values": experience.values,
            "advantages": samples.advantages,
            "returns": samples.returns,
            "log_ratios": experience.old_logprobs - experience.rollout_logprobs,
        }
        for name, tensor in expected.items():
            torch.testing.assert_close(torch.tensor(line[name]).float(), tensor[row, :num], rtol=1e-3, atol=1e-6)


def test_tokens_are_written_from_saved_rollouts_and_not_at_all_where_none_are_asked_for(tmp_path: Path) -> None:
    given = ["algo=ppo", "algo.mismatch.correction=tis", "train.responses_per_prompt=4", "train.num_iterations=1"]
    saving = [*given, "logger.save_rollouts=true", "logger.num_token_records=0"]
    World().run_job(tmp_path / "one", saving)
    assert not (tmp_path / "one" / "tokens.jsonl").exists()
    World().run_job(tmp_path / "two", [*given, f"rollout.file={tmp_path}/one/rollouts.jsonl"])
    lines = load(tmp_path / "two")
    assert lines
    assert all(line["age"] == 1 and any(line["advantages"]) for line in lines)


def test_each_set_is_sampled_in_its_own_way_where_an_evaluation_is_due(tmp_path: Path) -> None:
    plain, more = {}, {}
    for run_dir, sets, lines in ((tmp_path / "plain", False, plain), (tmp_path / "more", True, more)):
        with World().open_trainer(run_dir, ["algo=grpo", "train.num_iterations=2", "train.eval_every=2"]) as trainer:
            prompts = trainer.fleet.heldout[:3]
            if sets:
                trainer.components.collector._eval_sets = (
                    EvalSet("greedy", prompts, 1, Sampling(0.0, urgent=True)),
                    EvalSet("sampled", prompts, 4, Sampling(0.9, urgent=True)),
                )
            trainer.run()
        lines |= {line["iteration"]: line for line in load_metrics(run_dir / "metrics.jsonl")}
    names = ("reward_mean", "correct", "failed_frac", "length_mean", "truncated_frac")
    found = {name for line in more.values() for name in line if name.startswith("eval/")}
    assert found == {f"eval/{each}/{name}" for each in ("greedy", "sampled") for name in names}
    assert [number for number, line in more.items() if "eval/greedy/correct" in line] == [0, 2]
    assert all(find_metric(name).startswith("eval/{set}/") for name in found)
    # They change nothing of the training.
    assert [line.get("reward/mean") for line in more.values()] == [line.get("reward/mean") for line in plain.values()]


def test_sets_are_files_with_the_runs_prompts_and_are_refused_by_their_key(tmp_path: Path) -> None:
    path = tmp_path / "hard.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(9)))
    given = f"train.eval_sets={{hard: {{path: {path}, num_prompts: 4, num_samples: 3, temperature: 0.5, top_p: 0.9}}}}"
    config = load_config([given, "data=jsonl", "data.path=train.jsonl", "reward=exact", "data.prompt_length=99"])
    config = replace(config, data=replace(config.data, instruction="Compute {question}"))
    (found,) = build_eval_sets(config, build_byte_tokenizer(), {"": None})
    assert (found.name, found.num_samples, len(found.prompts)) == ("hard", 3, 4)
    assert found.sampling == Sampling(0.5, urgent=True, truncation=Truncation(0.9, -1))
    assert found.prompts[0].text.startswith("Compute ")
    path.unlink()
    with pytest.raises(ConfigError, match=r"^train\.eval_sets\.hard\.path: .*hard\.jsonl does not exist"):
        build_eval_sets(config, build_byte_tokenizer(), {"": None})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("={a: {pth: x}}", r"train\.eval_sets\.a\.pth"),
        ("={a: {num_prompts: 2}}", r"train\.eval_sets\.a\.path: .*missing"),
        ("={a: {path: x, num_samples: 2}}", "found 2; at train.eval_sets.a.temperature=0 all samples"),
        (".a.path=x", r"given whole, train\.eval_sets='\{NAME: \{path: FILE"),
    ],
)
def test_a_set_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([f"train.eval_sets{text}"])
