"""Presets that ask most of the real parts: replay, dynamic sampling, a KL over the whole vocabulary.

All presets: tests/unit/loop/test_loop_presets.py, over the fakes. With real parts vapo runs in test_command.py, grpo
in test_layouts_trained.py.
"""

from collections.abc import Iterator
from math import isfinite
from pathlib import Path

import pytest
import torch
from loop_parts import hosts_of, open_trainer

from megarl.report.metrics import load_metrics
from megarl.run.job import RunResources
from megarl.task.scorer import Scorer
from megarl.types import Prompt, Response, Score

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture(scope="module")
def hosts(server) -> Iterator[RunResources]:
    with hosts_of(server, num_workers=3) as hosts:
        yield hosts


@pytest.fixture
def overrides(tiny_checkpoint: Path) -> list[str]:
    return [f"model.path={tiny_checkpoint}", "train.num_iterations=2", "train.eval_every=2"]


def test_dynamic_sampling_trains_on_groups_of_different_rewards_only(hosts, overrides, tmp_path):
    def score(prompt: Prompt, response: Response) -> Score:
        # Half of the letters are always right: their groups carry no signal.
        right = prompt.text[0] in "abc" or len(response.token_ids) % 2 == 0
        return Score(float(right), right)

    with open_trainer(hosts, tmp_path, ["algo=dapo", *overrides]) as trainer:
        trainer.components.collector._scorer = Scorer(score)
        assert trainer.run().num_iterations == 2
        rollout, metrics = trainer.source.take(3)
        assert {s.prompt.text[0] for s in rollout.samples} <= {"d", "e", "f"}
        assert metrics["sampling/rounds"] > 1
    lines = load_metrics(tmp_path / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [0, 1, 2]
    assert all(isfinite(line["policy/loss"]) and line["policy/grad_norm"] > 0 for line in lines[1:])


def test_topr_learns_from_replayed_samples_weighted_by_the_ratio_to_the_policy_that_sampled_them(
    hosts, overrides, tmp_path
):
    given = ["algo=topr", "algo.replay.num_iterations=2", "algo.replay.frac=0.5", "train.num_iterations=3"]
    with open_trainer(hosts, tmp_path, [*overrides, *given]) as trainer:
        trainer.fleet.publish(0)
        trainer.train(1)
        first = trainer.state.metrics
        trainer.fleet.publish(1)
        rollout, _ = trainer.source.take(2)
        experience, metrics = trainer.roles.score(rollout, 1)
        assert "replay/frac" not in first
        assert experience.ages.tolist() == [0] * 128 + [1] * 128
        fresh, old = experience.ages == 0, experience.ages == 1
        gap = (experience.old_logprobs - experience.rollout_logprobs).abs()
        # The engines agree on fresh samples; the older ones were sampled by another policy.
        assert gap[fresh][experience.mask[fresh]].max() < 1e-4
        assert gap[old][experience.mask[old]].max() > 1e-3
        samples, metrics = trainer.algorithm.build_targets(experience, 1)
        assert metrics["replay/frac"] == 0.5
        assert metrics["mismatch/kl"] < 1e-6 < metrics["replay/kl"]
        # The trainer's own log-probs of the weights that sampled: now, and in the first iteration of the replayed.
        assert torch.equal(samples.sampling_logprobs, experience.sampling_logprobs)
        assert bool(experience.scored[experience.mask].all())
        own = (experience.sampling_logprobs - experience.rollout_logprobs)[experience.mask]
        assert own.abs().max() < 1e-4
        assert own.abs().max() > 0
        assert torch.equal(experience.sampling_logprobs[fresh], experience.old_logprobs[fresh])
        update = trainer.roles.update(samples, 2)
        assert isfinite(update["policy/loss"])
        assert 0 < update["topr/taper_mean"] < 1


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
