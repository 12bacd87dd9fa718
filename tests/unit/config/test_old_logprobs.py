"""When the policy scores the responses before its update, and when old_logprobs are the update's own."""

import itertools

import pytest

from megarl.algo.registry import reads_old_logprobs
from megarl.config.load import load_config
from megarl.config.old_logprobs import list_pass_reasons, reuses_logprobs, scores_first
from megarl.config.schema.roles import Fp8

ONE_STEP = ("algo=grpo", "train.num_minibatches=1")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ((), None),
        (("algo.kl.in_loss=true", "algo.kl.loss_coef=0.1"), None),
        (("algo.mismatch.correction=tis",), None),
        (("rollout.max_staleness=1", "algo.mismatch.correction=tis"), None),
        (("train.num_minibatches=2",), "2 optimizer steps in an iteration"),
        (("train.epochs_per_iteration=3",), "3 optimizer steps in an iteration"),
        (("algo=ppo", "algo.kl.in_reward=true"), "algo.kl.in_reward=true: the rewards need them"),
        (("algo=topr",), "the topr terms"),
        (("model=tiny_moe", "rollout.router_replay=true"), "rollout.router_replay=true"),
        (("+model.megatron.moe_input_jitter_eps=0.01",), "model.megatron.moe_input_jitter_eps"),
    ],
)
def test_the_policy_scores_first_for_a_reason_only(overrides, reason):
    chosen = [text for text in ONE_STEP if text.split("=")[0] not in [each.split("=")[0] for each in overrides]]
    config = load_config([*chosen, *overrides])
    reasons = list_pass_reasons(config)
    assert [text.startswith(reason) for text in reasons] == [True] if reason else reasons == []
    assert (scores_first(config), reuses_logprobs(config)) == (reason is not None, reason is None)


def test_every_combination_scores_first_or_reuses_exactly_where_something_reads_them():
    config = load_config([*ONE_STEP])
    for surrogate, minibatches, in_reward, in_loss, fp8, reuse in itertools.product(
        ("clip", "dis", "dppo", "gspo"), (1, 2), (False, True), (False, True), (None, Fp8.hybrid), (False, True)
    ):
        config.algo.surrogate, config.train.num_minibatches = surrogate, minibatches
        config.algo.kl.in_reward, config.algo.kl.in_loss = in_reward, in_loss
        config.policy.fp8, config.train.reuse_logprobs = fp8, reuse
        needed = minibatches > 1 or in_reward or fp8 is not None or not reuse
        reads = surrogate in ("clip", "gspo") or in_reward or in_loss
        assert reads == reads_old_logprobs(config.algo)
        assert scores_first(config) == (reads and needed)
        assert reuses_logprobs(config) == (reads and not needed)


def test_an_iteration_of_more_samples_than_a_minibatch_and_a_frozen_policy_are_scored_first():
    config = load_config([*ONE_STEP])
    size = config.train.minibatch_size
    assert reuses_logprobs(config, size, 1)
    assert not reuses_logprobs(config, size + 1, 1)
    config.policy.frozen_iterations = 2
    assert [reuses_logprobs(config, size, iteration) for iteration in (1, 2, 3)] == [False, False, True]
