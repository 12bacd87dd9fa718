"""What policy, critic and servers get by the configuration: schedules, versions, ranges of values, turns on GPUs; when
the policy scores the responses before its update, and when old_logprobs are the update's own.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo.objective import format_critic, needs_pass, reads_old_logprobs, reuses_logprobs, scores_first
from megarl.config.checks import find_nearest_divisor, find_return_range
from megarl.config.load import load_config
from megarl.config.placement import check_cluster, find_server_offload, list_groups, take_turns
from megarl.config.schema.roles import Fp8

TINY = ("algo=vapo", "model=tiny")
ONE_GPU = ("cluster.gpus_per_node=1", "cluster.placement=colocated")
ON_TWO_NODES = ("algo=vapo", "model=qwen3_8b", "cluster=h100x16", "cluster.placement=split", "rollout.transport=split")
SUM = ("reward=weighted", "reward.parts.right.kind=exact", "reward.parts.right.weight=0.75")
FILE = "rollout.file=r.jsonl"


def test_warm_up_and_decay_may_be_shares_of_the_run() -> None:
    shares = ("policy.optimizer.warmup_ratio=0.1", "policy.optimizer.decay_iterations=null")
    config = load_config(["train.num_iterations=50", "policy.optimizer.decay=cosine", *shares])
    schedule = config.policy.optimizer.resolve_schedule(config.train.num_optimizer_steps, 50)
    assert (schedule.warmup_steps, schedule.decay_steps) == (20, 200)


def test_a_frozen_policy_keeps_its_version_and_the_objective_says_what_the_critic_does() -> None:
    keys = ["critic.value_range=[-1,1]", "critic.trainable=mlp", "policy.frozen_iterations=3"]
    config = load_config(["algo=ppo", "reward.wrong=-1", *keys])
    assert [config.policy.is_frozen(iteration) for iteration in (1, 3, 4)] == [True, True, False]
    assert [config.policy.count_versions(iteration) for iteration in (0, 3, 4, 6)] == [0, 0, 1, 3]
    text = format_critic(config.policy, config.critic, config.algo)
    assert text is not None
    assert "V = -1 + 2 (1/2 + atan(z)/pi)" in text
    assert "frozen in the first 3 iterations" in text
    # Where a preset asks for the MLPs, adapters take their place.
    config = load_config(["algo=sao", "critic.lora.rank=8"])
    text = format_critic(config.policy, config.critic, config.algo)
    assert text is not None
    assert "adapters of rank 8 (attention and mlp) and value head alone are trained" in text


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], (0, 1)),
        (["reward.wrong=0.25"], (0.25, 1)),
        (["reward.wrong=0.25", "algo.gamma=0.9"], (0, 1)),
        (["reward.wrong=-3", "algo.reward_clip=2"], (-2, 1)),
        (["algo.overlong.penalty=1", "rollout.response_length=64"], (-1, 1)),
        (["reward=function", "reward.path=package.module:score"], None),
        (["reward=function", "reward.path=package.module:score", "reward.wrong=-1"], (-1, 1)),
        (["environment=guess", "data=guess", "reward=environment"], None),
        # A sum has the range of its parts.
        ([*SUM, "reward.parts.long.kind=length", "reward.parts.long.weight=-0.5"], (-0.5, 0.75)),
    ],
)
def test_the_range_of_returns_is_that_of_the_rewards(overrides: list[str], expected: object) -> None:
    assert find_return_range(load_config(["algo=ppo", "reward.wrong=0", *overrides])) == expected


@pytest.mark.parametrize(
    ("overrides", "offload", "turns"),
    [
        ([*TINY, *ONE_GPU, "rollout.offload=all"], "all", False),
        ([*TINY, *ONE_GPU, "rollout.offload=kv_cache"], "kv_cache", False),
        ([*TINY, "rollout.offload=all", "policy.offload=all"], "all", False),  # GPUs are not counted
        ([*TINY, *ONE_GPU], None, False),
        # A preset's value has no effect where the servers have GPUs of their own, and hinders nothing.
        ([*ON_TWO_NODES, "rollout.max_staleness=1", "algo.mismatch.correction=tis"], None, None),
        (["algo=topr", "model=tiny", "cluster.gpus_per_node=1", FILE], None, None),
        ([*TINY, *ONE_GPU, "policy.offload=all"], None, True),
        ([*TINY, *ONE_GPU, "critic.offload=optimizer"], None, True),
        ([*TINY, "cluster.gpus_per_node=2", "cluster.placement=split", "policy.offload=all"], None, True),
        ([*TINY, "cluster.gpus_per_node=3", "policy.offload=all"], None, False),
    ],
)
def test_servers_give_memory_back_and_roles_take_turns_where_they_share_gpus(
    overrides: list[str], offload: str | None, turns: bool | None
) -> None:
    config = load_config(overrides)
    assert getattr(find_server_offload(config), "name", None) == offload
    assert turns is None or take_turns(config) is turns


def test_without_servers_all_devices_are_the_roles() -> None:
    config = load_config(["model=tiny", "algo=topr", FILE])
    assert [(group.name, group.num_processes) for group in list_groups(config)] == [("policy", 1), ("servers", 0)]
    assert [group.num_processes for group in list_groups(config, "evaluate")] == [config.rollout.num_servers]
    big = load_config(["algo=topr", "model=qwen3_0_6b", "cluster=h100x8", "policy.parallel.num_processes=8", FILE])
    assert list(check_cluster(big)) == []


@given(number=st.integers(1, 200), wanted=st.integers(1, 300))
def test_no_divisor_is_nearer(number: int, wanted: int) -> None:
    found = find_nearest_divisor(number, wanted)
    assert number % found == 0
    assert all(abs(n - wanted) >= abs(found - wanted) for n in range(1, number + 1) if number % n == 0)


ONE_STEP = ("algo=grpo", "train.num_minibatches=1")


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        (["train.num_minibatches=1", "rollout.max_staleness=1", "algo.mismatch.correction=tis"], False),
        (["algo=topr", "train.num_minibatches=1"], True),
        (["train.num_minibatches=1", "model=tiny_moe", "rollout.router_replay=true"], True),
        (["train.num_minibatches=1", "+model.megatron.moe_input_jitter_eps=0.01"], True),
    ],
)
def test_the_policy_scores_first_for_a_reason_only(overrides, needed):
    config = load_config(["algo=grpo", *overrides] if "algo=topr" not in overrides else overrides)
    assert (needs_pass(config), scores_first(config), reuses_logprobs(config)) == (needed, needed, not needed)


def test_every_combination_scores_first_or_reuses_exactly_where_something_reads_them():
    config = load_config([*ONE_STEP])
    size, flags = config.train.minibatch_size, (False, True)
    assert reuses_logprobs(config, size, 1)
    assert not reuses_logprobs(config, size + 1, 1)
    for surrogate, minibatches, in_reward, in_loss, fp8, reuse in itertools.product(
        ("clip", "dis", "dppo", "gspo"), (1, 2), flags, flags, (None, Fp8.hybrid), flags
    ):
        config.algo.surrogate, config.train.num_minibatches = surrogate, minibatches
        config.algo.kl.in_reward, config.algo.kl.in_loss = in_reward, in_loss
        config.policy.fp8, config.train.reuse_logprobs = fp8, reuse
        needed = minibatches > 1 or in_reward or fp8 is not None or not reuse
        reads = surrogate in ("clip", "gspo") or in_reward or in_loss
        found = (reads_old_logprobs(config.algo), scores_first(config), reuses_logprobs(config))
        assert found == (reads, reads and needed, reads and not needed)


def test_a_frozen_policy_is_scored_first():
    config = load_config([*ONE_STEP])
    config.policy.frozen_iterations = 2
    reuses = [reuses_logprobs(config, config.train.minibatch_size, iteration) for iteration in (1, 2, 3)]
    assert reuses == [False, False, True]
