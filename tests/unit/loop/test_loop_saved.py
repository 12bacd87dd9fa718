"""The loop over rollout.file: without servers, with every ratio that of the policy that sampled the responses."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.disturbed import Disturbance, Killed, check_disturbed
from fakes.run import World, load
from generation import load_rollouts

from megarl.files import CheckpointError
from megarl.report.record import load_metrics
from megarl.rollout.rollout_file import Limits, find_groups
from megarl.rollout.source import SavedPretraining
from megarl.trainer import Trainer
from megarl.types import TrainingSamples

TOPR = ("algo=topr", "reward.wrong=0", "train.num_iterations=4", "checkpoint.save_every=1")
PPO_TIS = ("algo=ppo", "algo.mismatch.correction=tis", "reward.wrong=0", "train.responses_per_prompt=4")
NUM_SAVED = 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run of three iterations has sampled with its weights of versions 0 to 2: 18 groups of 4."""
    run_dir = tmp_path_factory.mktemp("earlier")
    given = ["algo=topr", "reward.wrong=0", "logger.save_rollouts=true", f"train.num_iterations={NUM_SAVED}", "seed=5"]
    World().run_job(run_dir, given)
    versions = {rollout.weight_version for rollout in load_rollouts(run_dir / "rollouts.jsonl")}
    assert versions == {0, 1, 2}
    return run_dir / "rollouts.jsonl"


def open_trainer(run_dir: Path, saved: Path, *overrides: str) -> Any:
    return World().open_trainer(run_dir, [*overrides, f"rollout.file={saved}"])


def test_no_token_counts_as_sampled_by_the_present_weights_even_where_its_version_has_their_number(saved, tmp_path):
    recorded = {
        (sample.prompt.id, tuple(sample.response.token_ids.tolist())): sample.response.rollout_logprobs.tolist()
        for rollout in load_rollouts(saved)
        for sample in rollout.samples
    }
    with open_trainer(tmp_path, saved, *TOPR) as trainer:
        seen = set()
        for iteration in range(1, 1 + NUM_SAVED):
            trainer.fleet.publish(iteration - 1)
            rollout, metrics = trainer.source.take(iteration)
            experience, _ = trainer.roles.score(rollout, 1)
            seen |= {version for s in rollout.samples for version in s.response.weight_versions.expand().tolist()}
            assert rollout.weight_version == iteration - 1
            assert experience.ages.tolist() == [iteration] * 24
            assert not experience.scored.any()
            assert experience.too_stale is None
            assert metrics["saved/epoch"] == iteration / 3
            for row, sample in enumerate(rollout.samples):
                n = len(sample.response)
                expected = recorded[sample.prompt.id, tuple(sample.response.token_ids.tolist())]
                assert experience.sampling_logprobs[row, :n].tolist() == expected
                assert experience.rollout_logprobs[row, :n].tolist() == expected
        assert seen == {0, 1, 2}


def build_targets(trainer: Trainer) -> TrainingSamples:
    trainer.fleet.publish(0)
    rollout, _ = trainer.source.take(1)
    experience, _ = trainer.roles.score(rollout, 1)
    return trainer.algorithm.build_targets(experience, 1)[0]


def test_ppos_ratio_begins_at_the_present_policy_and_tis_weights_by_the_recorded_one(saved, tmp_path):
    with open_trainer(tmp_path, saved, *PPO_TIS, "algo.loss_agg_mode=token-mean", "algo.mismatch.high=1.1") as trainer:
        samples = build_targets(trainer)
        mask = samples.mask
        ratio = (samples.old_logprobs.double() - samples.rollout_logprobs.double()).exp()
        assert (ratio[mask] > 1.1).any()
        assert (ratio[mask] < 0.9).any()
        total = 0.0
        for row, column in mask.nonzero().tolist():
            # The importance ratio of the first step is 1: it is to old_logprobs, computed now.
            weight = min(float(ratio[row, column]), 1.1)
            total -= weight * float(samples.advantages[row, column])
        step = trainer.roles.policy.update(samples, [torch.arange(24)]).result()[0]
    assert step["policy/loss"] == pytest.approx(total / int(mask.sum()), rel=1e-4, abs=1e-6)
    assert step["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("overrides", [TOPR, (*PPO_TIS, "critic.optimizer.lr=0.1", "train.num_iterations=4")])
def test_the_better_responses_become_likelier_and_nothing_is_generated_or_evaluated(saved, tmp_path, overrides):
    world = World()
    summary = world.run_job(tmp_path, [*overrides, "train.num_iterations=12", f"rollout.file={saved}"])
    lines = load_metrics(tmp_path / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == list(range(13))
    assert math.isnan(summary.heldout_reward)
    gap = [line["replay/logprob_above"] - line["replay/logprob_below"] for line in lines[1:]]
    assert gap[-1] > gap[0] + 0.3
    if overrides is TOPR:
        assert lines[-1]["replay/logprob_above"] > lines[1]["replay/logprob_above"]
    assert lines[3]["saved/epoch"] == 1
    assert all(name.split("/")[0] not in ("reward", "heldout", "mismatch", "sync") for line in lines for name in line)
    assert lines[2]["replay/age_mean"] == 2
    assert (tmp_path / "policy" / "model.safetensors").is_file()
    assert ("servers", "publish") not in world.log


def test_value_pretraining_learns_from_a_file_and_training_goes_on(saved, tmp_path):
    given = ["algo=vapo", "algo.mismatch.correction=tis", "algo.value_pretrain.steps=2", "train.num_iterations=1"]
    given += ["train.responses_per_prompt=4", f"algo.value_pretrain.rollouts={saved}", f"rollout.file={saved}"]
    assert World().run_job(tmp_path, given).num_iterations == 1
    assert [line["iteration"] for line in load_metrics(tmp_path / "metrics.jsonl")] == [-2, -1, 0, 1]


def test_a_killed_run_resumes_at_its_place_in_the_file_to_the_end_of_an_unbroken_one(saved, tmp_path):
    # 5 groups an iteration: the third iteration reaches from the first pass over the 18 into the second.
    given = [*TOPR, "train.prompts_per_iteration=5", f"rollout.file={saved}"]
    check_disturbed(tmp_path, given, Disturbance(Killed, "policy", "update", 3))


def test_a_run_does_not_resume_on_another_file(saved, tmp_path):
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(saved.read_bytes())
    World().run_job(tmp_path / "run", [*TOPR, "train.num_iterations=1", f"rollout.file={copy}"])
    lines = copy.read_bytes().splitlines(keepends=True)
    copy.write_bytes(b"".join(lines[:48]))
    # These tests' inputs are cached by their overrides, which therefore differ.
    given = [*TOPR, "train.num_iterations=2", f"rollout.file={copy}"]
    with pytest.raises(CheckpointError, match="the data have changed"):
        World().run_job(tmp_path / "run", given)


def test_a_file_that_changes_during_the_run_is_refused(saved, tmp_path):
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(saved.read_bytes())
    with open_trainer(tmp_path / "run", copy, *TOPR) as trainer:
        copy.write_bytes(saved.read_bytes().replace(b'"correct":true', b'"correct":null'))
        with pytest.raises(RuntimeError, match=r"copy\.jsonl:\d+: the file has changed"):
            trainer.source.take(1)


def test_value_pretraining_repeats_its_file_in_order_and_goes_on_in_it_wherever_it_was(saved, tmp_path):
    said: list[str] = []
    config, _ = load(["algo=vapo", "algo.value_pretrain.steps=9", f"algo.value_pretrain.rollouts={saved}"])
    expected = [[s.prompt.id for s in rollout.samples] for rollout in load_rollouts(saved)]
    groups = find_groups(saved, Limits(1000, 1000, 1000))
    assert len(expected) == len(set(map(tuple, expected))) > 1
    for first in range(-8, 1):
        pretraining = SavedPretraining(config.algo.value_pretrain, groups, said.append)
        for iteration in range(first, 1):
            taken = [s.prompt.id for group in pretraining.take(iteration).fresh for s in group]
            assert taken == expected[(iteration + 8) % len(expected)]
    assert said[0].startswith(f"pass 1 over the rollouts of {saved} is complete")
