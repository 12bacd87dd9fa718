"""Dynamic sampling, replay and the overlong buffer: what contradicts what."""

import pytest

from megarl.config.errors import ConfigError
from megarl.config.load import load_config


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
