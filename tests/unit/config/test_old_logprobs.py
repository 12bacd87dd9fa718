"""When the policy scores the responses before its update, and when old_logprobs are the update's own."""

import itertools

import pytest

from megarl.algo.objective import needs_pass, reads_old_logprobs, reuses_logprobs, scores_first
from megarl.config.load import load_config
from megarl.config.schema.roles import Fp8

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
