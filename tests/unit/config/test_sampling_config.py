"""Dynamic sampling, replay and the overlong buffer: what contradicts what."""

import pytest

from megarl.config.errors import ConfigError
from megarl.config.load import load_config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algo=ppo", "algo.dynamic_sampling.enabled=true"], "train.responses_per_prompt=1"),
        (["algo=dapo", "algo.dynamic_sampling.max_rounds=0"], "algo.dynamic_sampling.max_rounds: 0 found"),
        (["algo=dapo", "algo.overlong.buffer=100"], "algo.overlong.buffer: found 100; it is a part of rollout.resp"),
        (["algo=vapo", "algo.replay.num_iterations=2"], "the critic's returns would be of older policies"),
        (["algo=grpo", "algo.replay.num_iterations=2"], "the surrogate takes its samples as the present policy's"),
        *(
            (
                [f"algo={name}", f"{key}=2"],
                f"{key}: 2 found with algo.mismatch.correction=none; the surrogate takes its",
            )
            for name in ("rloo", "grpo", "dapo", "lite_ppo", "reinforce_pp")
            for key in ("algo.replay.num_iterations", "rollout.max_staleness")
        ),
        (["algo=vapo", "rollout.max_staleness=1"], "must be 0, or algo.mismatch.correction=tis (or mis)"),
        (["algo=topr", "algo.rl_loss_coef=1", "rollout.max_staleness=1"], "rollout.max_staleness: 1 found"),
        (["algo=topr", "algo.replay.num_iterations=2", "algo.replay.frac=1"], "algo.replay.frac: 1.0 found"),
        (
            ["algo=topr", "algo.replay.num_iterations=2", "algo.reward_norm.std=running"],
            "would count a replayed reward again",
        ),
        (
            ["algo=grpo", "algo.kl.loss_estimator=full", "policy.parallel={pp: 2, num_processes: 2}"],
            "policy.parallel.pp",
        ),
        (["train.max_samples=0"], "train.max_samples: found 0"),
    ],
)
def test_a_contradiction_is_an_error_that_names_the_key(overrides, message):
    with pytest.raises(ConfigError) as error:
        load_config(["model=tiny", *overrides])
    assert message in "\n".join(error.value.problems)


@pytest.mark.parametrize("key", ["algo.replay.num_iterations", "rollout.max_staleness"])
def test_older_samples_go_with_topr_and_with_a_surrogate_corrected_for_the_sampling_policy(key):
    load_config(["algo=topr", f"{key}=2"])
    for name in ("lite_ppo", "rloo"):
        for correction in ("tis", "mis"):
            load_config([f"algo={name}", f"{key}=2", f"algo.mismatch.correction={correction}"])


def test_a_critic_learns_from_samples_ahead_but_not_from_replayed_ones():
    load_config(["algo=vapo", "rollout.max_staleness=1", "algo.mismatch.correction=tis"])
    with pytest.raises(ConfigError, match="the critic's returns would be of older policies"):
        load_config(["algo=vapo", "algo.replay.num_iterations=1", "algo.mismatch.correction=tis"])


def test_dapo_is_clip_higher_with_dynamic_sampling_and_a_soft_overlong_penalty():
    config = load_config(["algo=dapo", "model=tiny"])
    algo = config.algo
    assert (algo.clip_low, algo.clip_high, algo.dynamic_sampling.enabled) == (0.2, 0.28, True)
    assert (algo.advantage, algo.advantage_std.name, algo.loss_agg_mode.name) == ("group", "group", "token-mean")
    assert (algo.overlong.penalty, config.train.responses_per_prompt, algo.kl.in_loss) == (1.0, 16, False)


@pytest.mark.parametrize("surrogate", ["dis", "dppo"])
def test_a_loss_with_a_ratio_to_the_rollout_takes_samples_of_older_policies_as_they_are(surrogate: str) -> None:
    given = [f"algo.surrogate={surrogate}", "algo.clip_high=0.3"]
    load_config(["algo=vapo", "rollout.max_staleness=4", *given])
    load_config(["algo=lite_ppo", "algo.replay.num_iterations=2", *given])
    with pytest.raises(ConfigError, match="count the mismatch twice: must be none"):
        load_config(["algo=vapo", "rollout.max_staleness=4", "algo.mismatch.correction=tis", *given])
    with pytest.raises(ConfigError, match=r"algo\.mismatch\.low: has no effect under algo\.surrogate=" + surrogate):
        load_config(["algo=vapo", "algo.mismatch.low=0.3", *given])
    load_config(["algo=vapo", "algo.mismatch.low=0.3", "algo.kl.in_reward=true", *given])


def test_a_surrogate_that_needs_a_correction_says_which_ones_do_not() -> None:
    with pytest.raises(ConfigError, match=r"algo\.surrogate=dis or dppo, whose ratio is to that policy"):
        load_config(["algo=vapo", "algo.surrogate=cispo", "rollout.max_staleness=1"])
