"""Warm-up and decay of the learning rate as shares of the run."""

import pytest

from megarl.config.errors import ConfigError
from megarl.config.load import load_config


def test_warm_up_and_decay_may_be_shares_of_the_run():
    shares = ("policy.optimizer.warmup_ratio=0.1", "policy.optimizer.decay_iterations=null")
    config = load_config(["train.num_iterations=50", "policy.optimizer.decay=cosine", *shares])
    schedule = config.policy.optimizer.resolve_schedule(config.train.num_optimizer_steps, 50)
    assert (schedule.warmup_steps, schedule.decay_steps) == (20, 200)
    with pytest.raises(ConfigError, match=r"warmup_steps: has no effect with policy\.optimizer\.warmup_ratio=0\.1"):
        load_config(["policy.optimizer.warmup_ratio=0.1", "policy.optimizer.warmup_steps=5"])


@pytest.mark.parametrize(
    ("ratio", "message"),
    [("1.5", r"warmup_ratio: found 1\.5; it must be 0 or more and at most 1"), ("1.0", r"above .*warmup_ratio=1 \(")],
)
def test_a_share_that_is_none_or_leaves_no_decay_is_refused(ratio, message):
    with pytest.raises(ConfigError, match=message):
        load_config([f"policy.optimizer.warmup_ratio={ratio}", "policy.optimizer.decay=linear"])
