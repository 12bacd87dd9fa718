"""Every preset with its real parts: Ray, Megatron-Core roles, and the session's SGLang server.

After test_server.py, whose first tests need the server as it was started.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import isfinite
from pathlib import Path

import pytest
import torch
from loop_parts import hosts_of, open_trainer

from megarl.algo.registry import needs_critic
from megarl.config.load import list_options
from megarl.config.schema.algo import needs_reference
from megarl.report.metrics import load_metrics
from megarl.rollout.collector import Collector
from megarl.rollout.dynamic_sampling import NoRewardVarianceError
from megarl.run.job import RunResources
from megarl.trainer import Trainer
from megarl.types import Prompt, Response, Score

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def hosts(server) -> Iterator[RunResources]:
    with hosts_of(server, num_workers=3) as hosts:
        yield hosts


@pytest.fixture
def overrides(tiny_checkpoint: Path) -> list[str]:
    return [f"model.path={tiny_checkpoint}", "train.num_iterations=2", "train.eval_every=2"]


def with_reward(trainer: Trainer, score) -> Trainer:
    """The same parts under another verdict."""
    collector = Collector(trainer.components.engine, score, temperature=1.0)
    return Trainer(trainer.config, replace(trainer.components, collector=collector))


@pytest.mark.parametrize("algo", list_options("algo"))
def test_every_preset_trains_with_the_roles_it_needs_and_no_other(hosts, overrides, tmp_path, algo):
    pretraining = ["algo.value_pretrain.steps=0"] if algo in ("vapo", "vc_ppo") else []
    with open_trainer(hosts, tmp_path, [f"algo={algo}", *overrides, *pretraining]) as trainer:
        components, config = trainer.components, trainer.config.algo
        assert (components.critic is not None) == needs_critic(config) == (algo in ("ppo", "vc_ppo", "vapo"))
        with_kl = algo in ("reinforce_pp", "reinforce_pp_baseline", "rloo", "grpo")
        assert (components.reference is not None) == needs_reference(config) == with_kl
        before = components.policy.checksum().result()
        assert trainer.run().num_iterations == 2
        assert components.policy.checksum().result() != before
    lines = load_metrics(tmp_path / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [0, 1, 2]
    assert all(isfinite(line["policy/loss"]) and line["policy/grad_norm"] > 0 for line in lines[1:])
    assert all(("kl/mean" in line) == with_kl for line in lines[1:])
    assert all(("critic/loss" in line) == needs_critic(config) for line in lines[1:])


def test_the_critic_takes_its_own_number_of_passes_and_both_roles_every_epoch(hosts, overrides, tmp_path):
    """Seen in the learning rates, which fall by a step at every optimizer step."""
    schedule = ["lr=0.1", "min_lr=0", "decay=linear", "decay_steps=10"]
    given = [
        *[f"{role}.optimizer.{text}" for role in ("policy", "critic") for text in schedule],
        "train.prompts_per_iteration=4",
        "train.responses_per_prompt=4",
        "train.samples_per_minibatch=8",
        "train.epochs_per_iteration=2",
        "critic.updates_per_policy_update=2",
    ]
    with open_trainer(hosts, tmp_path, ["algo=ppo", *overrides, *given]) as trainer:
        trainer.publish(0)
        trainer.train(1)
        metrics = trainer.state.metrics
    # 2 minibatches x 2 epochs: the mean of 0.09 ... 0.06; the critic's 8 steps: of 0.09 ... 0.02.
    assert metrics["policy/lr"] == pytest.approx(0.075)
    assert metrics["critic/lr"] == pytest.approx(0.055)


def test_dynamic_sampling_trains_on_groups_of_different_rewards_only(hosts, overrides, tmp_path):
    def score(prompt: Prompt, response: Response) -> Score:
        # Half of the letters are always right: their groups carry no signal.
        right = prompt.text[0] in "abc" or len(response.token_ids) > 20
        return Score(float(right), right)

    given = ["algo=dapo", "algo.overlong.penalty=0", "algo.overlong.buffer=0"]
    with open_trainer(hosts, tmp_path, [*overrides, *given]) as trainer:
        trainer.publish(0)
        other = with_reward(trainer, score)
        other.version = trainer.version
        rollout, metrics = other.collect(1)
        names = {s.prompt.text[0] for s in rollout.samples}
        assert names <= {"d", "e", "f"}
        assert len(rollout.samples) == 256
        assert metrics["sampling/rounds"] > 1
        assert metrics["sampling/total_samples"] == other.num_samples == 16 * metrics["sampling/num_prompts"]
        easy = with_reward(trainer, lambda _prompt, _response: Score(1.0, True))
        easy.version = trainer.version
        with pytest.raises(NoRewardVarianceError, match="too easy"):
            easy.collect(2)


def test_topr_learns_from_replayed_samples_weighted_by_the_ratio_to_the_policy_that_sampled_them(
    hosts, overrides, tmp_path
):
    given = ["algo=topr", "algo.replay.num_iterations=2", "algo.replay.frac=0.5", "train.num_iterations=3"]
    with open_trainer(hosts, tmp_path, [*overrides, *given]) as trainer:
        trainer.publish(0)
        trainer.train(1)
        first = trainer.state.metrics
        trainer.publish(1)
        rollout, _ = trainer.collect(2)
        experience, metrics = trainer.build_experience(rollout)
        assert "replay/frac" not in first
        assert experience.ages.tolist() == [0] * 128 + [1] * 128
        fresh, old = experience.ages == 0, experience.ages == 1
        gap = (experience.old_logprobs - experience.rollout_logprobs).abs()
        # The engines agree on fresh samples; the older ones were sampled by another policy.
        assert gap[fresh][experience.mask[fresh]].max() < 1e-4
        assert gap[old][experience.mask[old]].max() > 1e-3
        samples, metrics = trainer.build_targets(experience, trainer.config.algo)
        assert metrics["replay/frac"] == 0.5
        assert metrics["mismatch/kl"] < 1e-6 < metrics["replay/kl"]
        assert torch.equal(samples.rollout_logprobs, experience.rollout_logprobs)
        update = trainer.update(samples, 2)
        assert isfinite(update["policy/loss"])


def test_a_kl_over_the_whole_vocabulary_is_zero_at_first_and_grows_with_the_updates(hosts, overrides, tmp_path):
    given = [
        "algo=reinforce_pp",
        "algo.kl.reward_estimator=full",
        "algo.kl.in_loss=true",
        "algo.kl.loss_estimator=full",
    ]
    with open_trainer(hosts, tmp_path, [*overrides, *given]) as trainer:
        # The policy's own process holds the reference.
        assert trainer.components.reference is None
        trainer.run()
    first, second = load_metrics(tmp_path / "metrics.jsonl")[1:]
    assert first["kl/mean"] == pytest.approx(0, abs=1e-7)
    assert second["kl/mean"] > 1e-4
    assert first["policy/kl_loss"] > 0


def test_a_run_ends_after_its_number_of_samples(hosts, overrides, tmp_path):
    given = ["algo=lite_ppo", "train.num_iterations=50", "train.max_samples=300"]
    with open_trainer(hosts, tmp_path, [*overrides, *given]) as trainer:
        assert trainer.run().num_iterations == 2
        assert trainer.num_samples == 512
    assert "reward/heldout" in load_metrics(tmp_path / "metrics.jsonl")[-1]
