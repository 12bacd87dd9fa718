"""Rewards at the ends of turns: where they stand, how they are scaled, who uses them."""

import dataclasses
import math

import pytest
import reference
import torch
from algo_cases import as_lists, configure, experiences, f64, make_experience, norm, some, with_turn_rewards
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo.targets import compute_targets

LIMIT = 20
SCOPES = ["none", "batch", "group"]

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


@some
@given(
    experiences(),
    st.integers(0, 1000),
    st.sampled_from(SCOPES),
    st.sampled_from(SCOPES),
    st.sampled_from([None, 0.8]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([0.0, -1.0]),
)
def test_targets_with_turn_rewards_equal_the_reference(e, seed, mean, std, clip, penalty, wrong):
    e = with_turn_rewards(e, seed)
    if wrong:
        e = dataclasses.replace(e, rewards=e.rewards.clamp(0, 1))
    for advantage in ("gae", "reinforce"):
        algo = configure(advantage=advantage, gamma=0.97, reward_clip=clip, kl__in_reward=True)
        algo.reward_norm, algo.overlong.penalty = norm(mean, std), penalty
        samples, _ = compute_targets(e, algo, 0.3, response_length=LIMIT, wrong=wrong)
        expected = reference.targets(as_lists(e), algo, 0.3, LIMIT, wrong)
        torch.testing.assert_close(samples.advantages, f64(expected.advantages), rtol=1e-7, atol=1e-7)
        if samples.returns is not None:
            torch.testing.assert_close(samples.returns, f64(expected.returns), rtol=1e-7, atol=1e-7)


def test_topr_refuses_advantages_that_change_within_a_response():
    algo = configure(advantage="reinforce", topr__positive_loss_coef=1.0)
    with pytest.raises(ValueError, match=r"algo\.advantage: reinforce found with an environment's rewards at the ends"):
        compute_targets(conversation(), algo, 0.0)
    compute_targets(conversation(rewards=(1.0, 0.0), turn_rewards=(0.1, 0.1)), configure(advantage="group"), 0.0)
