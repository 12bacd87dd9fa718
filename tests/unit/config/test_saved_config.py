"""rollout.file: what it contradicts, which keys then have no effect, and that no server is placed."""

import pytest

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.placement import check_cluster, find_server_offload, list_groups
from megarl.run.command import format_results

FILE = "rollout.file=runs/a/rollouts.jsonl"
TOPR = ("model=tiny", "algo=topr", FILE)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algo=topr"],
        ["algo=ppo", "algo.mismatch.correction=tis"],
        ["algo=grpo", "algo.mismatch.correction=mis"],
        ["algo=vapo", "algo.mismatch.correction=tis", "algo.value_pretrain.rollouts=runs/a/rollouts.jsonl"],
        ["algo=vapo", "algo.mismatch.correction=tis", "algo.value_pretrain.enabled=false"],
    ],
)
def test_losses_that_weight_by_the_policy_that_sampled_are_allowed(overrides):
    assert load_config(["model=tiny", *overrides, FILE]).rollout.file == "runs/a/rollouts.jsonl"


@pytest.mark.parametrize(
    "override",
    [
        *("data.num_heldout=3", "reward.num_workers=2", "rollout.num_servers=2", "rollout.num_threads=2"),
        *("train.eval_every=2", "train.max_samples=100", "logger.save_rollouts=true", "train.num_eval_prompts=4"),
        *("checkpoint.keep_best=2", "data.chat_template=true"),
    ],
)
def test_a_key_of_generation_or_evaluation_has_no_effect(override):
    given = ["data=jsonl", "data.path=p.jsonl"] if override.startswith("data") else []
    given += ["reward=math"] if override.startswith("reward") else []
    with pytest.raises(ConfigError, match=rf"{override.split('=')[0]}: has no effect with rollout\.file"):
        load_config([*TOPR, *given, override])


@pytest.mark.parametrize(
    "override",
    [
        *("data.prompt_length=64", "reward.wrong=-0.5", "rollout.temperature=0.7", "rollout.response_length=16"),
        "train.max_minutes=3",
    ],
)
def test_a_key_of_what_is_learned_has_one(override):
    load_config([*TOPR, override])


def test_what_the_critic_alone_reads_has_an_effect():
    given = ["model=tiny", "algo=ppo", "algo.mismatch.correction=tis", FILE, "data.critic_prompt='{answer}='"]
    config = load_config([*given, "data.critic_prompt_length=4", "data.chat_template=true"])
    assert config.data.num_critic_tokens == 4


def test_all_devices_are_the_roles():
    config = load_config([*TOPR, "rollout.file=r.jsonl"])
    assert [(group.name, group.num_processes) for group in list_groups(config)] == [("policy", 1), ("servers", 0)]
    assert [group.num_processes for group in list_groups(config, "evaluate")] == [config.rollout.num_servers]
    big = load_config(["algo=topr", "model=qwen3_0_6b", "cluster=h100x8", "policy.parallel.num_processes=8", FILE])
    assert list(check_cluster(big)) == []
    assert find_server_offload(big) is None


def test_a_reward_that_nobody_measured_is_shown_as_none():
    assert format_results({"iterations": 3, "reward/heldout": float("nan")}) == "iterations=3 reward/heldout=none"
    assert format_results({"iterations": 3, "reward/heldout": 0.5}) == "iterations=3 reward/heldout=0.5000"
