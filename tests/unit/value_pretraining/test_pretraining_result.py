"""What value pretraining leaves for training runs: taken where it is whole and theirs, refused by name where not."""

import dataclasses
import json
from pathlib import Path

import pytest

from megarl.algo.statistics import RunningMoments
from megarl.checkpoint.manifest import write_manifest
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.value_pretraining.inputs import list_pretraining_inputs
from megarl.value_pretraining.result import PretrainedState, copy_rollouts, load_pretrained, split_times

CURVE = ({"iteration": 1, "pretrain/loss": 0.5, "time/rollout": 3.0}, {"iteration": 2, "pretrain/loss": 0.25})


def write_pretrained(run_dir: Path, *overrides: str) -> PretrainedState:
    """As `python -m megarl.pretrain_value algo=vapo OVERRIDES` leaves it, but for the critic's files."""
    inputs = list_pretraining_inputs(load_config(["algo=vapo", *overrides]))
    sampler = {"seed": 1, "epoch": 0, "position": 3, "prompts": "ab"}
    state = PretrainedState(512, RunningMoments(2, 0.5, 0.25), sampler, CURVE, inputs)
    directory = run_dir / "pretrained"
    (directory / "critic").mkdir(parents=True)
    (directory / "critic" / "weights").write_text("numbers")
    write_manifest(directory / "critic", {})
    (directory / "state.json").write_text(json.dumps(dataclasses.asdict(state)))
    write_manifest(directory, {})
    return state


def load(run_dir: Path, *overrides: str):
    return load_pretrained(load_config(["algo=vapo", f"algo.value_pretrain.taken_from={run_dir}", *overrides]))


def test_a_run_that_differs_in_nothing_that_counts_gets_the_state_as_it_was(tmp_path):
    state = write_pretrained(tmp_path)
    found = load(tmp_path, "algo.clip_high=0.3", "train.num_iterations=3", "cluster.object_store_mb=300")
    assert found is not None
    assert found[1] == tmp_path / "pretrained"
    assert dataclasses.replace(found[0], inputs={}) == dataclasses.replace(state, inputs={})


def test_a_run_without_the_key_has_nothing_to_load():
    assert load_pretrained(load_config(["algo=vapo"])) is None


def test_another_configuration_is_refused_by_the_keys_that_differ(tmp_path):
    write_pretrained(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"taken_from: .* has another configuration: critic\.optimizer\.lr \(\S+ there, now 0\.0001\),"
        r" seed \(1 there, now 2\) differ",
    ):
        load(tmp_path, "seed=2", "critic.optimizer.lr=1e-4")


def test_a_critic_of_another_scale_of_the_reward_is_refused(tmp_path):
    write_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has another configuration: reward\.wrong \(0\.0 there, now -1\.0\) differ"):
        load(tmp_path, "reward.wrong=-1")


def test_a_critic_that_read_another_text_is_refused_naming_both(tmp_path):
    write_pretrained(tmp_path, "data.critic_prompt='{answer}='")
    assert load(tmp_path, "data.critic_prompt='{answer}='", "data.critic_prompt_length=9") is not None
    with pytest.raises(ConfigError, match=r"data\.critic_prompt \('\{answer\}=' there, now '\{answer\}\.'\) differ"):
        load(tmp_path, "data.critic_prompt='{answer}.'")
    with pytest.raises(ConfigError, match=r"data\.critic_prompt \('\{answer\}=' there, now None\) differ"):
        load(tmp_path)


def test_a_damaged_or_missing_one_is_named_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match=r"algo\.value_pretrain\.taken_from: .*no manifest\.json"):
        load(tmp_path)
    write_pretrained(tmp_path)
    (tmp_path / "pretrained" / "critic" / "weights").write_text("numbere")
    with pytest.raises(ConfigError, match=r"algo\.value_pretrain\.taken_from: .*damaged: weights"):
        load(tmp_path)


def test_the_curve_is_taken_over_without_the_seconds_of_another_run():
    assert split_times(CURVE) == [(1, {"pretrain/loss": 0.5}), (2, {"pretrain/loss": 0.25})]


def test_the_responses_of_value_pretraining_come_into_the_file_that_training_appends_to(tmp_path):
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "rollouts.jsonl").write_text("one\n")
    with (tmp_path / "rollouts.jsonl").open("a") as writer:
        copy_rollouts(tmp_path / "from", tmp_path)
        writer.write("two\n")
    assert (tmp_path / "rollouts.jsonl").read_text() == "one\ntwo\n"
