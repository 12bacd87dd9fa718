"""Rewards at the ends of turns: where they stand, how they are scaled, who uses them."""

import dataclasses
import math

import pytest
import reference
import torch
from algo_cases import as_lists, configure, experiences, f64, make_experience, norm, some, with_turn_rewards
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo.declarations import AdvantageInputs
from megarl.algo.rewards import compute_shaped_rewards, compute_turn_rewards, update_reward_moments
from megarl.algo.statistics import RunningMoments
from megarl.algo.targets import compute_targets
from megarl.algo.value_pretraining import build_pretraining_algo

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


def advantages(e, algo, **keys):
    return compute_targets(e, algo, 0.0, **keys)[0].advantages


def close(found, expected):
    torch.testing.assert_close(found, f64(expected), rtol=1e-9, atol=1e-9)


def test_the_reward_to_go_of_a_later_turn_has_no_reward_of_an_earlier_one():
    algo = configure(advantage="reinforce")
    close(advantages(conversation(), algo), [[1.0, 1.0, 0.0, 0.0, 0.7, 0.7]])


def test_gamma_discounts_by_generated_tokens_from_each_reward():
    algo = configure(advantage="reinforce", gamma=0.5)
    # The observation's two tokens cost nothing: 0.7 is three generated tokens after the first one.
    first = 0.5 * 0.3 + 0.5**3 * 0.7
    close(advantages(conversation(), algo), [[first, 0.3 + 0.25 * 0.7, 0.0, 0.0, 0.35, 0.7]])


def test_gae_goes_from_the_end_of_an_action_to_the_start_of_the_next_one():
    # SAO (2607.07508): the value after an action's last token is that of the next action's first token.
    algo = configure(lambda_policy=0.0, lambda_critic=0.0)
    samples, _ = compute_targets(conversation(), algo, 0.0)
    close(samples.advantages, [[0.4 - 0.5, 0.3 + 0.8 - 0.4, 0.0, 0.0, 0.7 - 0.8, 0.7 - 0.7]])
    close(samples.returns, [[0.4, 1.1, 0.0, 0.0, 0.7, 0.7]])
    algo = configure(lambda_policy=0.5, gamma=0.9)
    deltas = [0.9 * 0.4 - 0.5, 0.3 + 0.9 * 0.8 - 0.4, 0.9 * 0.7 - 0.8, 0.7 - 0.7]
    expected = [sum(0.45**k * deltas[t + k] for k in range(4 - t)) for t in range(4)]
    close(advantages(conversation(), algo), [[*expected[:2], 0.0, 0.0, *expected[2:]]])


EPISODES = (
    # Generated tokens, their values, rewards of turns by position, the whole reward; advantages and returns of the
    # generated tokens with gamma 0.5 and with gamma 0, by hand: lambda is 0.5 for the policy and 1 for the critic.
    # The response limit is hit in an observation.
    ("1100", [0.5, 0.25], {}, 1.0, ([-0.1875, 0.75], [0.5, 1.0]), ([-0.5, 0.75], [0.0, 1.0])),
    # The environment fails after the second action: the observation is missing.
    ("101", [0.5, 0.25], {0: 0.3}, 1.0, ([0.0375, 0.45], [0.65, 0.7]), ([-0.2, 0.45], [0.3, 0.7])),
    # The limit of turns, with the last observation; the turns' rewards are all of the reward.
    ("10010", [0.5, 1.0], {0: 0.25, 3: 0.25}, 0.5, ([0.0625, -0.75], [0.375, 0.25]), ([-0.25, -0.75], [0.25, 0.25])),
    # It begins with an observation, and between two others stands an action of no tokens.
    ("010001", [0.5, 0.5], {}, 1.0, ([-0.125, 0.5], [0.5, 1.0]), ([-0.5, 0.5], [0.0, 1.0])),
    # One token, and an observation behind it.
    ("10", [0.5], {}, -1.0, ([-1.5], [-1.0]), ([-1.5], [-1.0])),
)


@pytest.mark.parametrize("poison", [math.nan, 1e6])
def test_gae_across_observations_is_that_of_five_episodes_by_hand(poison):
    own = torch.tensor([[mark == "1" for mark in marks.ljust(6, "0")] for marks, *_ in EPISODES])
    n = len(EPISODES)
    lengths, rewards = [len(each[0]) for each in EPISODES], [each[3] for each in EPISODES]
    e = make_experience([*range(n)], lengths, rewards, [False] * n, 0, holes=False)
    values, turns = torch.full(own.shape, poison, dtype=torch.float64), torch.zeros(own.shape, dtype=torch.float64)
    values[own] = f64([value for each in EPISODES for value in each[1]])
    for row, (_, _, placed, *_) in enumerate(EPISODES):
        for position, reward in placed.items():
            turns[row, position] = reward
    e = dataclasses.replace(e, mask=own, scored=own, values=values, turn_rewards=turns)
    for number, gamma in ((4, 0.5), (5, 0.0)):
        samples, _ = compute_targets(e, configure(lambda_policy=0.5, lambda_critic=1.0, gamma=gamma), 0.0)
        for found, which in ((samples.advantages, 0), (samples.returns, 1)):
            close(found[own], [x for each in EPISODES for x in each[number][which]])
            assert not found[~own].any()


def test_value_pretraining_learns_the_rewards_that_are_still_to_come():
    returns = compute_targets(conversation(), build_pretraining_algo(configure()), 0.0)[0].returns
    close(returns, [[1.0, 1.0, 0.0, 0.0, 0.7, 0.7]])


def test_the_critics_outcomes_have_the_turns_rewards():
    # With lambda 1 the middle state's outcome is its return: 0.7 and -0.2 after the first turns' 0.3 and 0.2.
    e = conversation(rewards=(1.0, 0.0), turn_rewards=(0.3, 0.2))
    e = dataclasses.replace(e, values=e.values * f64([[1.0], [0.0]]))
    metrics = compute_targets(e, configure(), 0.0)[1]
    assert metrics["critic/calibration_slope_middle"] == pytest.approx((0.7 + 0.2) / 0.8)
    assert metrics["critic/calibration_slope_first"] == pytest.approx(1.0 / 0.5)


@pytest.mark.parametrize("name", ["rloo", "group"])
def test_group_estimators_take_the_sum(name):
    e = conversation(rewards=(1.0, 0.0), turn_rewards=(0.3, 0.9))
    plain = dataclasses.replace(e, turn_rewards=None)
    assert torch.equal(advantages(e, configure(advantage=name)), advantages(plain, configure(advantage=name)))


def spread(e, algo, **keys):
    """The token rewards of the first sample's generated tokens."""
    rewards, turns = compute_shaped_rewards(e, algo, **keys), compute_turn_rewards(e, algo, **keys)
    inputs = AdvantageInputs(rewards, None, e.mask, e.groups, None, turns)
    return inputs.token_rewards_BT[0, e.mask[0]]


def test_turn_rewards_have_the_scale_of_the_reward_and_the_end_has_the_rest():
    algo = configure()
    close(spread(conversation(), algo), [0.0, 0.3, 0.0, 0.7])
    # -1 + 2 * 0.8 is 0.6, of which the turn's part is 2 * 0.3.
    close(spread(conversation(rewards=(0.8,)), algo, wrong=-1.0), [0.0, 0.6, 0.0, 0.0])
    # Two tokens of four into the buffer; the penalty is at the end.
    algo = configure(overlong__penalty=1.0, overlong__buffer=4)
    close(spread(conversation(), algo, response_length=8), [0.0, 0.3, 0.0, 0.7 - 0.5])
    # The clip bounds the whole response's reward.
    close(spread(conversation(), configure(reward_clip=0.5)), [0.0, 0.3, 0.0, 0.2])


def test_turn_rewards_are_divided_by_the_standard_deviation_and_the_mean_is_subtracted_at_the_end():
    e = conversation(rewards=(3.0, 1.0), turn_rewards=(0.5, 0.0))
    close(spread(e, configure(reward_norm=norm("batch", "none"))), [0.0, 0.5, 0.0, 0.5])
    # Mean 2, std 1 + 1e-6: R' = 1.
    one = 1 / (1 + 1e-6)
    close(spread(e, configure(reward_norm=norm("batch", "batch"))), [0.0, 0.5 * one, 0.0, 0.5 * one])
    algo = configure(reward_norm=norm("running", "running"))
    moments = update_reward_moments(RunningMoments(), e, algo)
    close(spread(e, algo, reward_moments=moments), [0.0, 0.5 * one, 0.0, 0.5 * one])


def test_equal_rewards_are_0_with_their_turns_where_a_standard_deviation_divides():
    e = conversation(rewards=(1.0, 1.0), turn_rewards=(0.5, 0.0))
    close(spread(e, configure(reward_norm=norm("group", "group"))), [0.0, 0.0, 0.0, 0.0])
    close(spread(e, configure(reward_norm=norm("group", "none"))), [0.0, 0.5, 0.0, -0.5])


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


@some
@given(experiences(), st.integers(0, 1000), st.sampled_from(SCOPES), st.sampled_from(SCOPES), st.booleans())
def test_the_token_rewards_of_a_response_sum_to_its_shaped_reward(e, seed, mean, std, clipped):
    e = with_turn_rewards(e, seed)
    algo = configure(reward_norm=norm(mean, std), reward_clip=0.7 if clipped else None)
    rewards, turns = compute_shaped_rewards(e, algo), compute_turn_rewards(e, algo)
    found = AdvantageInputs(rewards, None, e.mask, e.groups, None, turns).token_rewards_BT.sum(1)
    some_tokens = e.mask.any(1)
    torch.testing.assert_close(found[some_tokens], rewards[some_tokens])


def test_topr_refuses_advantages_that_change_within_a_response():
    algo = configure(advantage="reinforce", topr__positive_loss_coef=1.0)
    with pytest.raises(ValueError, match=r"algo\.advantage: reinforce found with an environment's rewards at the ends"):
        compute_targets(conversation(), algo, 0.0)
    compute_targets(conversation(rewards=(1.0, 0.0), turn_rewards=(0.1, 0.1)), configure(advantage="group"), 0.0)


def test_turn_rewards_must_be_finite_and_have_the_masks_shape():
    e = conversation()
    with pytest.raises(ValueError, match="turn_rewards: 4 of 4 entries are not finite"):
        compute_targets(dataclasses.replace(e, turn_rewards=e.turn_rewards * math.inf), configure(), 0.0)
    with pytest.raises(ValueError, match=r"turn_rewards: shape \[1, 5\] found"):
        compute_targets(dataclasses.replace(e, turn_rewards=torch.zeros(1, 5)), configure(), 0.0)
