"""critic.value_range, critic.trainable and policy.frozen_iterations: what contradicts them is named."""

import pytest

from megarl.algo.objective import format_critic
from megarl.config.checks.critic import check_critic, find_return_range
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema.reward import WeightedRewardConfig
from megarl.config.schema.roles import Trainable


def problem_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(["algo=ppo", *overrides])
    return str(caught.value)


def test_the_keys_are_read() -> None:
    keys = ["critic.value_range=[-1,1]", "critic.trainable=mlp", "policy.frozen_iterations=3"]
    config = load_config(["algo=ppo", "reward.wrong=-1", *keys])
    assert config.critic.value_range == [-1.0, 1.0]
    assert config.critic.trainable is Trainable.mlp
    assert [config.policy.is_frozen(iteration) for iteration in (1, 3, 4)] == [True, True, False]
    assert [config.policy.count_versions(iteration) for iteration in (0, 3, 4, 6)] == [0, 0, 1, 3]


def test_the_printed_objective_says_what_they_do() -> None:
    keys = ["critic.value_range=[-1,1]", "critic.trainable=mlp", "policy.frozen_iterations=3"]
    config = load_config(["algo=ppo", "reward.wrong=-1", *keys])
    assert format_critic(config.policy, config.critic) == (
        "critic      = V = -1 + 2 (1/2 + atan(z)/pi) of the value head's z; MLPs and value head alone are trained; the"
        " policy is frozen in the first 3 iterations"
    )
    config = load_config(["algo=ppo"])
    assert format_critic(config.policy, config.critic) is None


@pytest.mark.parametrize("found", ["[1,0]", "[0,0]", "[0]", "[0,1,2]", "[0,inf]", "[]"])
def test_a_range_is_two_rising_numbers(found: str) -> None:
    assert "it must be [low, high], two finite numbers with low below high" in problem_of(f"critic.value_range={found}")


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


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("algo.kl.in_reward=true", "which nothing bounds"),
        ("algo.reward_norm.mean=batch", "normalized rewards have no fixed range"),
        ("algo.reward_norm.std=running", "normalized rewards have no fixed range"),
    ],
)
def test_returns_without_a_fixed_range_are_refused_with_the_reason(override: str, why: str) -> None:
    assert why in problem_of("critic.value_range=[-1,1]", "reward.wrong=0", override)


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


def test_a_frozen_policy_needs_a_critic_and_an_iteration_to_learn_in() -> None:
    assert "must be below 5" in problem_of("policy.frozen_iterations=5", "train.num_iterations=5")
    load_config(["algo=ppo", "policy.frozen_iterations=4", "train.num_iterations=5"])
    with pytest.raises(ConfigError, match=r"policy\.frozen_iterations: found 3 with algo\.advantage=group"):
        load_config(["algo=grpo", "policy.frozen_iterations=3"])
    load_config(["algo=grpo", "policy.frozen_iterations=0"])
    assert "it must be 0 or more" in problem_of("policy.frozen_iterations=-1")


def test_what_a_preset_says_of_a_critic_counts_for_nobody_without_one() -> None:
    config = load_config(["algo=grpo"])
    config.critic.value_range = [3.0, 2.0]
    assert list(check_critic(config)) == []
