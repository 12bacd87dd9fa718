"""Rewards at the ends of turns: where they stand, how they are scaled, who uses them."""

import dataclasses
import math

import pytest
import torch
from algo_cases import configure, f64, make_experience

from megarl.algo.algorithm import compute_targets

pytestmark = pytest.mark.filterwarnings("ignore:length-adaptive")


def conversation(rewards=(1.0,), turn_rewards=(0.3,)):
    """Responses of two tokens of the policy, two of the environment and two of the policy; the first turn's rewards
    are parts of the rewards.
    """
    n = len(rewards)
    e = make_experience([0] * n, [6] * n, list(rewards), [False] * n, 0, holes=False)
    own = torch.tensor([True, True, False, False, True, True])
    placed = torch.zeros(n, 6, dtype=torch.float64)
    placed[:, 1] = f64(list(turn_rewards))
    values = f64([[0.5, 0.4, math.nan, math.nan, 0.8, 0.7]]).expand(n, 6)
    return dataclasses.replace(e, mask=own.expand(n, 6), scored=own.expand(n, 6), turn_rewards=placed, values=values)


def test_the_critics_outcomes_have_the_turns_rewards():
    # With lambda 1 the middle state's outcome is its return: 0.7 and -0.2 after the first turns' 0.3 and 0.2.
    e = conversation(rewards=(1.0, 0.0), turn_rewards=(0.3, 0.2))
    e = dataclasses.replace(e, values=e.values * f64([[1.0], [0.0]]))
    metrics = compute_targets(e, configure(), 0.0)[1]
    assert metrics["critic/calibration_slope_middle"] == pytest.approx((0.7 + 0.2) / 0.8)
    assert metrics["critic/calibration_slope_first"] == pytest.approx(1.0 / 0.5)


def test_topr_refuses_advantages_that_change_within_a_response():
    algo = configure(advantage="reinforce", topr__positive_loss_coef=1.0)
    with pytest.raises(ValueError, match=r"algo\.advantage: reinforce found with an environment's rewards at the ends"):
        compute_targets(conversation(), algo, 0.0)
    compute_targets(conversation(rewards=(1.0, 0.0), turn_rewards=(0.1, 0.1)), configure(advantage="group"), 0.0)
