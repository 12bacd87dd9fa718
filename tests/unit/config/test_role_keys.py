"""Keys of policy, critic and servers: how a role computes, its schedule, its range of values, what it gives back."""

import pytest

from megarl.algo.objective import format_critic
from megarl.config.checks.config import check_critic, find_return_range
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.placement import find_server_offload, take_turns
from megarl.config.schema.run import ServerOffload
from megarl.config.schema.task import WeightedRewardConfig


def test_warm_up_and_decay_may_be_shares_of_the_run():
    shares = ("policy.optimizer.warmup_ratio=0.1", "policy.optimizer.decay_iterations=null")
    config = load_config(["train.num_iterations=50", "policy.optimizer.decay=cosine", *shares])
    schedule = config.policy.optimizer.resolve_schedule(config.train.num_optimizer_steps, 50)
    assert (schedule.warmup_steps, schedule.decay_steps) == (20, 200)


def problem_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(["algo=ppo", *overrides])
    return str(caught.value)


def test_a_frozen_policy_keeps_its_version() -> None:
    policy = load_config(["algo=ppo", "policy.frozen_iterations=3"]).policy
    assert [policy.is_frozen(iteration) for iteration in (1, 3, 4)] == [True, True, False]
    assert [policy.count_versions(iteration) for iteration in (0, 3, 4, 6)] == [0, 0, 1, 3]


def test_the_printed_objective_says_what_they_do() -> None:
    keys = ["critic.value_range=[-1,1]", "critic.trainable=mlp", "policy.frozen_iterations=3"]
    config = load_config(["algo=ppo", "reward.wrong=-1", *keys])
    assert format_critic(config.policy, config.critic) == (
        "critic      = V = -1 + 2 (1/2 + atan(z)/pi) of the value head's z; MLPs and value head alone are trained; the"
        " policy is frozen in the first 3 iterations"
    )
    config = load_config(["algo=ppo"])
    assert format_critic(config.policy, config.critic) is None


@pytest.mark.parametrize(
    ("overrides", "right"),
    [
        (["reward.wrong=-1"], "[-1, 1]"),
        (["reward.wrong=0", "algo.overlong.penalty=1", "rollout.response_length=64"], "[-1, 1]"),
        (["reward.wrong=-1", "algo.overlong.penalty=0.5", "rollout.response_length=64"], "[-1.5, 1]"),
    ],
)
def test_a_range_that_leaves_out_returns_is_refused_with_the_right_one(overrides: list[str], right: str) -> None:
    text = problem_of("critic.value_range=[0,1]", *overrides)
    assert text.startswith("critic.value_range: found [0, 1]; the returns")
    assert f"as {right} does" in text
    load_config(["algo=ppo", f"critic.value_range={right}".replace(" ", ""), *overrides])


def test_the_range_of_returns_is_that_of_the_rewards_and_unknown_where_scores_may_be_any_number() -> None:
    def find(*overrides: str) -> tuple[float, float] | None:
        return find_return_range(load_config(["algo=ppo", "reward.wrong=0", *overrides]))

    assert find() == (0, 1)
    assert find("reward.wrong=0.25") == (0.25, 1)
    assert find("reward.wrong=0.25", "algo.gamma=0.9") == (0, 1)
    assert find("reward.wrong=-3", "algo.reward_clip=2") == (-2, 1)
    assert find("reward=function", "reward.path=package.module:score") is None
    assert find("reward=function", "reward.path=package.module:score", "reward.wrong=-1") == (-1, 1)
    assert find("environment=guess", "data=guess", "reward=environment") is None
    config = load_config(["algo=ppo", "reward.wrong=0"])
    parts = {"right": {"kind": "exact", "weight": 0.75}, "long": {"kind": "length", "weight": -0.5}}
    config.reward = WeightedRewardConfig(parts)
    assert find_return_range(config) == (-0.5, 0.75)


def test_what_a_preset_says_of_a_critic_counts_for_nobody_without_one() -> None:
    config = load_config(["algo=grpo"])
    config.critic.value_range = [3.0, 2.0]
    assert list(check_critic(config)) == []


SHARED = ("algo=vapo", "model=tiny", "cluster.gpus_per_node=1", "cluster.placement=colocated", "rollout.offload=all")
ON_TWO_NODES = ("algo=vapo", "model=qwen3_8b", "cluster=h100x16", "cluster.placement=split", "rollout.transport=split")


def test_servers_give_memory_back_where_they_share_gpus_or_gpus_are_not_counted() -> None:
    assert find_server_offload(load_config(SHARED)) is ServerOffload.all
    assert find_server_offload(load_config([*SHARED, "rollout.offload=kv_cache"])) is ServerOffload.kv_cache
    assert find_server_offload(load_config(["algo=vapo", "model=tiny", "rollout.offload=all"])) is ServerOffload.all
    assert find_server_offload(load_config(SHARED[:-1])) is None
    # A preset's value has no effect where the servers have GPUs of their own, and hinders nothing.
    config = load_config([*ON_TWO_NODES, "rollout.max_staleness=1", "algo.mismatch.correction=tis"])
    assert config.rollout.offload is ServerOffload.all
    assert find_server_offload(config) is None


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["cluster.gpus_per_node=1", "cluster.placement=colocated"], False),
        (["cluster.gpus_per_node=1", "cluster.placement=colocated", "policy.offload=all"], True),
        (["cluster.gpus_per_node=1", "cluster.placement=colocated", "critic.offload=optimizer"], True),
        (["cluster.gpus_per_node=2", "cluster.placement=split", "policy.offload=all"], True),
        (["cluster.gpus_per_node=3", "policy.offload=all"], False),
        (["policy.offload=all"], False),
    ],
)
def test_roles_take_turns_where_they_share_gpus_and_leave_them(overrides: list[str], expected: bool) -> None:
    assert take_turns(load_config(["algo=vapo", "model=tiny", *overrides])) is expected
