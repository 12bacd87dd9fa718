"""compute_targets: every combination of estimator and shaping against the reference; diagnostics; TETHER's weight; GAE
and its variants, RLOO and group-relative advantages by hand.
"""

import dataclasses
import math

import pytest
import reference
import torch
from algo_cases import (
    as_lists,
    close,
    configure,
    experiences,
    f64,
    find_problems,
    make_experience,
    norm,
    some,
    with_turn_rewards,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algo.advantages import (
    ADVANTAGES,
    compute_gae,
    compute_group_relative,
    compute_rloo,
    fit_rho,
    sum_turn_gae,
    update_rho,
)
from megarl.algo.algorithm import compute_targets, measure_learned
from megarl.algo.diagnostics import compute_batch_metrics
from megarl.algo.statistics import NonFiniteError, compute_discounted_sums, split_blocks
from megarl.config.schema.algo import AdvantageStd, KLConfig, KLEstimator, LambdaLevel, StdOf, TetherConfig

LIMIT = 20
BATCH_RHO = "advantage/tether_rho_batch"

pytestmark = pytest.mark.filterwarnings("ignore:length-adaptive")


def check(e, algo, tol=1e-8, wrong=0.0):
    samples, metrics = compute_targets(e, algo, 0.3, response_length=LIMIT, wrong=wrong)
    expected = reference.targets(as_lists(e), algo, 0.3, LIMIT, wrong)
    dtype = e.old_logprobs.dtype
    assert samples.advantages.dtype is dtype
    close(samples.advantages, expected.advantages, tol)
    if expected.returns is None:
        assert samples.returns is None
    else:
        close(samples.returns, expected.returns, tol)
    assert samples.loss_mask.tolist() == expected.loss_mask
    assert samples.positive.tolist() == expected.positive
    assert metrics.get(BATCH_RHO) == pytest.approx(expected.fitted, abs=1e-6)
    assert all(math.isfinite(x) for x in metrics.values()), metrics
    return samples, metrics


SCOPES = st.sampled_from(["none", "batch", "group"])
COMMON = {
    "kl": st.builds(
        lambda where, estimator: KLConfig(
            **{where: True} if where else {}, reward_estimator=estimator, advantage_coef=0.4
        ),
        st.sampled_from(["in_reward", "in_advantage", None]),
        st.sampled_from(KLEstimator),
    ),
    "reward_norm": st.builds(norm, SCOPES, SCOPES),
    "reward_clip": st.sampled_from([None, 0.25, 0.8]),
    "advantage_clip": st.sampled_from([None, 0.5]),
    "whiten_advantages": st.booleans(),
    "overlong__penalty": st.sampled_from([0.0, 0.5, 1.0]),
    "overlong__buffer_frac": st.just(0.3),
    "overlong__filter": st.booleans(),
}
GAMMAS = st.sampled_from([0.9, 0.97, 1.0])
LAMBDAS = {
    **{"lambda_policy": st.sampled_from([0.0, 0.95, 1, "adaptive"]), "lambda_floor": st.sampled_from([0.0, 0.2, 1])},
    "lambda_level": st.sampled_from(LambdaLevel),
}
ESTIMATORS = {
    "control_variate": {"surrogate": st.just("logprob"), "lambda_critic": st.sampled_from([0.9, 1.0]), **LAMBDAS},
    "gae": {"gamma": GAMMAS, "lambda_critic": st.sampled_from([0.9, 1.0]), **LAMBDAS},
    "none": {},
    "reinforce": {"gamma": GAMMAS},
    "rloo": {},
    "group": {"advantage_std": st.sampled_from(AdvantageStd), "std_of": st.sampled_from(StdOf)},
    "tether": {
        **{"surrogate": st.just("logprob"), "lambda_critic": st.sampled_from([0.9, 1.0])},
        "tether__initial": st.sampled_from([0.0, 0.3, 1.0]),
    },
}


@pytest.mark.parametrize("advantage", ESTIMATORS)
@settings(some, max_examples=80)
@given(st.data(), st.sampled_from([None, 1, 2, 3]), st.sampled_from([0.0, -1.0]))
def test_targets_equal_the_reference_also_with_turn_rewards_and_rewards_of_wrong_answers(advantage, data, turns, wrong):
    e = data.draw(experiences(min_group=2 if advantage == "rloo" else 1))
    if turns is not None:
        e = with_turn_rewards(e, turns)
    if wrong:
        e = dataclasses.replace(e, rewards=e.rewards.clamp(0, 1))
    algo = data.draw(st.builds(configure, advantage=st.just(advantage), **COMMON, **ESTIMATORS[advantage]))
    if turns is None and data.draw(st.booleans()):
        drawn = torch.randint(3, (len(e.groups), 2), generator=torch.Generator().manual_seed(len(e.groups)))
        e = dataclasses.replace(e, reward_parts=drawn.to(e.rewards.dtype))
        algo.reward_norm.parts = {"a": 0.75, "b": -0.5}
    check(e, algo, 1e-7, wrong)


@pytest.mark.parametrize("length", [1, 20])
def test_short_responses_get_lambda_min_and_more_than_half_of_them_a_warning(length):
    e = make_experience([0, 0, 1], [length, length, 200], [1.0, 0.0, 0.3], [False] * 3, 1, holes=False)
    algo = configure(lambda_policy="adaptive")
    with pytest.warns(RuntimeWarning, match=r"more than half of the responses.*algo.length_alpha \(0.05\)"):
        _, metrics = check(e, algo)
    assert metrics["advantage/lambda_at_min_frac"] == pytest.approx(2 / 3)
    # 0.5, 0.5 and 1 - 1/(0.05 * 200) = 0.9
    assert metrics["advantage/lambda_mean"] == pytest.approx((0.5 + 0.5 + 0.9) / 3)


def test_positive_is_decided_by_the_raw_reward():
    e = make_experience([0, 0, 0], [2, 2, 2], [1.0, 0.3, -1.0], [False] * 3, 0)
    algo = configure(reward_norm=norm("none", "batch"), reward_clip=0.1, positive_threshold=0.3)
    samples, metrics = compute_targets(e, algo, 0.0)
    assert samples.positive.tolist() == [True, True, False]
    assert metrics["reward/positive_frac"] == pytest.approx(2 / 3)


def test_a_masked_response_has_no_policy_loss_and_stays_in_the_statistics_and_with_the_critic():
    e = make_experience([0, 0, 1], [3, 4, 2], [1.0, 0.0, 0.5], [False, True, False], 0, holes=False)
    masked = dataclasses.replace(e, masked=torch.tensor([True, False, False]))
    for filtered in (False, True):
        algo = configure(advantage="gae", overlong__filter=filtered)
        samples, metrics = compute_targets(masked, algo, 0.0)
        unmasked, _ = compute_targets(e, algo, 0.0)
        assert samples.loss_mask.sum(1).tolist() == [0, 0 if filtered else 4, 2]
        for name in ("mask", "advantages", "returns"):
            torch.testing.assert_close(getattr(samples, name), getattr(unmasked, name))
        assert samples.critic_mask is None
        assert metrics["policy/dropped_frac"] == pytest.approx((7 if filtered else 3) / 9)


def test_neither_a_truncated_response_nor_a_token_that_is_too_stale_has_a_loss_and_the_critic_lacks_the_latter():
    e = make_experience([0, 0], [3, 4], [1.0, 0.0], [False, True], 0, holes=False)
    too_stale = torch.zeros_like(e.mask)
    too_stale[:, 0] = True
    algo = configure(advantage="gae", overlong__filter=True)
    unfiltered, _ = compute_targets(e, configure(advantage="gae"), 0.0)
    samples, metrics = compute_targets(dataclasses.replace(e, too_stale=too_stale), algo, 0.0)
    torch.testing.assert_close(samples.advantages, unfiltered.advantages)
    torch.testing.assert_close(samples.returns, unfiltered.returns)
    assert metrics["policy/dropped_frac"] == pytest.approx(5 / 7)
    assert samples.loss_mask.int().tolist() == [[0, 1, 1, 0], [0, 0, 0, 0]]
    assert samples.critic_mask.int().tolist() == [[0, 1, 1, 0], [0, 1, 1, 1]]
    assert samples.mask.int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize(
    "name", ["old_logprobs", "rollout_logprobs", "ref_logprobs", "ref_kl", "values", "turn_rewards"]
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_experience_that_is_not_finite_is_refused_by_name(name, bad):
    e = make_experience([0, 0], [3, 4], [1.0, 0.0], [False, False], 0, holes=False)
    tensor = torch.zeros(e.mask.shape) if name == "turn_rewards" else getattr(e, name).clone()
    tensor[1, 2:4] = bad
    with pytest.raises(NonFiniteError, match=rf"{name}: 2 of 7 entries are not finite, first in row 1"):
        compute_targets(dataclasses.replace(e, **{name: tensor}), configure(), 0.0)


@pytest.mark.parametrize(
    ("inputs", "keys", "message"),
    [
        ({"values": None}, {}, "values: none found"),
        ({"ref_logprobs": None}, {"kl__in_loss": True}, "ref_logprobs: none found"),
        ({"values": torch.zeros(2, 3)}, {}, r"values: shape \[2, 3\] found; must be that of the mask, \[2, 4\]"),
        ({"turn_rewards": torch.zeros(2, 3)}, {}, r"turn_rewards: shape \[2, 3\] found"),
        ({"rewards": torch.zeros(3)}, {}, r"rewards: shape \[3\] found"),
    ],
)
def test_missing_and_misshapen_inputs_are_errors(inputs, keys, message):
    e = make_experience([0, 0], [3, 4], [1.0, 0.0], [False, False], 0)
    with pytest.raises(ValueError, match=message):
        compute_targets(dataclasses.replace(e, **inputs), configure(**keys), 0.0)


@pytest.mark.parametrize("lengths", [[0, 0], [0, 3]])
def test_samples_without_generated_tokens_give_numbers(lengths):
    for advantage in ADVANTAGES:
        check(make_experience([0, 0], lengths, [1.0, 0.0], [False] * 2, 0), configure(advantage=advantage))


@some
@given(experiences(min_group=2), st.sampled_from([-1.0, -0.5, 0.5]))
def test_the_reward_of_a_wrong_answer_scales_advantages_and_leaves_the_scores_to_the_rest(e, wrong):
    e = dataclasses.replace(e, rewards=e.rewards.clamp(0, 1))
    for algo, factor in (
        (configure(advantage="group"), 1 - wrong),
        (configure(advantage="rloo"), 1 - wrong),
        (configure(advantage="reinforce", whiten_advantages=True), 1.0),
    ):
        plain, metrics = compute_targets(e, algo, 0.0)
        scaled, found = compute_targets(e, algo, 0.0, wrong=wrong)
        torch.testing.assert_close(scaled.advantages, factor * plain.advantages, atol=1e-5, rtol=1e-4)
        assert torch.equal(scaled.positive, plain.positive)
        assert found["reward/positive_frac"] == metrics["reward/positive_frac"]
        assert found["reward/shaped_mean"] == pytest.approx(wrong + (1 - wrong) * metrics["reward/shaped_mean"])
        assert compute_batch_metrics(e)["reward/mean"] == pytest.approx(float(e.rewards.mean()))


def test_what_is_left_out_is_counted_by_its_place_and_by_the_length_of_its_response():
    # Generated tokens 4, 8, 8 and 16; the longest response has lost its first half, one of 8 its first two tokens.
    lengths = torch.tensor([4, 8, 8, 16])
    mask = torch.arange(20) < lengths[:, None]
    # A token of the environment's in front moves the places, and changes nothing.
    mask = torch.cat([torch.zeros(4, 1, dtype=torch.bool), mask], dim=1)
    learned = mask.clone()
    learned[3, :9] = learned[1, :3] = False
    assert measure_learned(mask, learned) == {
        "policy/learned_frac_at_0_25": 3 / 9,
        "policy/learned_frac_at_25_50": 5 / 9,
        "policy/learned_frac_at_50_75": 1.0,
        "policy/learned_frac_at_75_100": 1.0,
        "policy/learned_frac_of_length_1": 1.0,
        "policy/learned_frac_of_length_2": 6 / 8,
        "policy/learned_frac_of_length_3": 1.0,
        "policy/learned_frac_of_length_4": 0.5,
    }
    assert measure_learned(mask[:0], mask[:0]) == {}


def test_the_next_weight_of_tether_is_the_decayed_mean_and_stays_where_a_batch_gives_none():
    assert update_rho(0.5, {BATCH_RHO: 1.0}, TetherConfig(decay=0.95)) == pytest.approx(0.525)
    assert update_rho(0.5, {}, TetherConfig()) == 0.5
    assert fit_rho(0.0, 0.0) is None
    assert fit_rho(-1.0, 2.0) == 0.0


def test_a_group_of_one_has_no_fit_and_tether_refuses_gamma_and_groups_of_one():
    tether = {"advantage": "tether", "surrogate": "logprob"}
    e = make_experience([0], [3], [1.0], [False], 0, holes=False)
    assert BATCH_RHO not in compute_targets(e, configure(**tether), 0.3)[1]
    for values, responses, message in (
        ({}, 1, "train.responses_per_prompt: 1 found"),
        ({"gamma": 0.9}, 4, "algo.gamma: 0.9 found"),
        ({"tether__decay": 1.5}, 4, "algo.tether.decay: found 1.5"),
    ):
        assert any(message in text for text in find_problems(configure(**tether, **values), responses, 1))
    assert find_problems(configure(**tether), 4, 1) == []


def test_the_control_variate_by_hand():
    # Two prompts of two responses with one token each; R - mean of the others: 1, -1, 2, -2.
    e = make_experience([0, 0, 1, 1], [1] * 4, [1.0, 0.0, 2.0, 0.0], [False] * 4, 0, holes=False)
    e, algo = dataclasses.replace(e, values=f64([[0.5], [0.5], [1.0], [2.0]])), configure(advantage="control_variate")
    # D = V - mean of the others = 0.5, -0.5; 1, 0: of the first prompt 1/0.5 = 2, so 1 for the second; of the second
    # 2/1 = 2, so 1 for the first.
    samples, metrics = compute_targets(e, algo, 0.0)
    close(samples.advantages, [[0.5], [-0.5], [1.0], [-2.0]])
    assert metrics["advantage/control_variate_weight"] == 1
    # D = 2, -2; 4, -4: (2 + 2) / 8 = 1/2 for the second prompt, (8 + 8) / 32 for the first.
    e = dataclasses.replace(e, values=f64([[2.0], [-1.0], [4.0], [-2.0]]))
    samples, metrics = compute_targets(e, algo, 0.0)
    close(samples.advantages, [[0.0], [0.0], [0.0], [0.0]])
    assert metrics["advantage/control_variate_weight"] == 0.5
    # One prompt alone: there are no others to fit the weight.
    one = dataclasses.replace(e, groups=torch.tensor([0, 0, 0, 0]))
    close(compute_targets(one, algo, 0.0)[0].advantages.flatten(), [1 / 3, -1.0, 5 / 3, -1.0])
    # One response to each prompt: the others are all of the batch. R - their mean: 1/3, -1, 5/3, -1; D = 4/3, -2, 11/3,
    # -3, so that of the first prompt (2 + 55/9 + 3) / (4 + 121/9 + 9) = 1/2.38, and A = 1/3 - 4/3 / 2.38.
    one = dataclasses.replace(e, groups=torch.arange(4))
    weight = (2 + 55 / 9 + 3) / (4 + 121 / 9 + 9)
    close(compute_targets(one, algo, 0.0)[0].advantages[:1], [[1 / 3 - weight * 4 / 3]])


def test_the_weight_of_a_prompt_does_not_depend_on_its_own_rewards():
    e = make_experience([0, 0, 1, 1], [9, 3, 20, 5], [1.0, 0.0, 0.3, 1.0], [False] * 4, 0, holes=False)
    found = [
        compute_targets(dataclasses.replace(e, rewards=f64(rewards)), configure(advantage="control_variate"), 0.0)
        for rewards in ([0.0, 0.0, 0.3, 1.0], [1.0, 0.0, 0.3, 1.0], [2.0, 0.0, 0.3, 1.0])
    ]
    # So the advantages are linear in them.
    first, second, third = (samples.advantages[:2] for samples, _ in found)
    close(third - second, (second - first).tolist())


def test_a_critic_of_noise_leaves_the_control_variate_near_the_groups_mean():
    chance = torch.Generator().manual_seed(1)
    rewards = torch.randint(2, (64,), generator=chance).double()
    e = make_experience([i // 8 for i in range(64)], [20] * 64, rewards.tolist(), [False] * 64, 0, holes=False)
    values = torch.randn(e.mask.shape, generator=chance, dtype=torch.float64) * 3
    e = dataclasses.replace(e, values=values.to(e.values.dtype))
    found = compute_targets(e, configure(advantage="control_variate", lambda_policy=1.0), 0.0)[0].advantages
    expected = compute_targets(e, configure(advantage="rloo"), 0.0)[0].advantages
    assert float((found - expected).square().mean()) < 0.1 * float(expected.square().mean())


def test_topr_refuses_advantages_that_change_within_a_response():
    e = with_turn_rewards(make_experience([0, 0], [6, 6], [1.0, 0.0], [False] * 2, 0, holes=False), 1)
    with pytest.raises(ValueError, match=r"algo\.advantage: reinforce found with an environment's rewards at the ends"):
        compute_targets(e, configure(advantage="reinforce", topr__positive_loss_coef=1.0), 0.0)
    compute_targets(e, configure(advantage="group"), 0.0)


def test_the_floor_of_lambda_is_the_share_of_lambda_one():
    e = make_experience([0, 0], [6, 4], [1.0, 0.3], [False] * 2, 0, holes=False)
    low, high, mixed = (
        compute_targets(e, configure(lambda_policy=lambda_, lambda_floor=floor), 0.0)[0].advantages
        for lambda_, floor in ((0.5, 0.0), (1.0, 0.0), (0.5, 0.25))
    )
    close(mixed, (0.75 * low + 0.25 * high).tolist())


ALL = torch.ones(1, 3, dtype=torch.bool)


def test_gae_by_hand():
    # gamma 0.9, lambda 0.5: delta_3 = 1 - 3 = -2; delta_2 = 0.9*3 - 2 = 0.7; delta_1 = 0.9*2 - 1 = 0.8
    # A_3 = -2; A_2 = 0.7 - 0.45*2 = -0.2; A_1 = 0.8 - 0.45*0.2 = 0.71
    found = compute_gae(f64([[0, 0, 1]]), f64([[1, 2, 3]]), ALL, 0.9, 0.5)
    close(found, [[0.71, -0.2, -2.0]])


def test_gae_over_turns_by_hand():
    # Two turns of two tokens, gamma and lambda 0.5. The second: rewards to come 2, so A = 2 - 3, 2 - 4. The first:
    # delta = 1 - 1 + 0.5*3 = 1.5, A_1 = 1.5 + 0.25*(2 - 3) = 1.25; at its second token 1.25 + 1 - 2.
    mask = torch.tensor([[True, True, False, True, True]])
    rewards, values = f64([[0, 1, 9, 0, 2]]), f64([[1, 2, 9, 3, 4]])
    (block,) = split_blocks(mask)
    found = sum_turn_gae(block.flatten(rewards), block.flatten(values), block, 0.5, 0.5)
    close(found, [1.25, 0.25, -1.0, -2.0])
    # Of one turn it is the reward less the value, whatever gamma and lambda are.
    close(sum_turn_gae(f64([0, 0, 1]), f64([1, 2, 3]), next(split_blocks(ALL)), 0.9, 0.5), [0.0, -1.0, -2.0])


def test_gae_over_turns_of_one_token_is_gae():
    e = make_experience([0, 0], [9, 15], [1.0, 0.0], [False] * 2, 0, holes=False)
    e = dataclasses.replace(e, mask=e.mask & (torch.arange(15) % 2 == 0), scored=e.mask & (torch.arange(15) % 2 == 0))
    found = [
        compute_targets(e, configure(gamma=0.9, lambda_policy=0.8, lambda_critic=0.7, lambda_level=level), 0.0)[0]
        for level in LambdaLevel
    ]
    close(found[1].advantages, found[0].advantages.tolist())
    close(found[1].returns, found[0].returns.tolist())


@pytest.mark.parametrize("positions", [1, 31, 32, 33, 64, 1025, 2100])
def test_block_boundaries_change_nothing(positions):
    g = torch.Generator().manual_seed(positions)
    x = torch.randn(3, positions, generator=g, dtype=torch.float64)
    decay = f64([0.0, 0.97, 1.0])
    expected, y = torch.zeros_like(x), torch.zeros(3, dtype=torch.float64)
    for t in reversed(range(positions)):
        y = x[:, t] + decay * y
        expected[:, t] = y
    torch.testing.assert_close(compute_discounted_sums(x, decay), expected, rtol=1e-11, atol=1e-11)


def test_float32_gae_of_a_long_batch_is_that_of_a_float64_loop():
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3000, 1, 17, 0, 2999])
    mask = torch.arange(3000) < lengths[:, None]
    mask[0, 100:200] = False
    values, rewards = torch.randn(2, 5, 3000, generator=g)
    found = compute_gae(rewards, values, mask, 1.0, 1.0)
    assert found.dtype is torch.float32
    rows = zip(rewards.tolist(), values.tolist(), mask.tolist(), strict=True)
    expected = [reference.gae_row(r, v, m, 1.0, 1.0) for r, v, m in rows]
    torch.testing.assert_close(found.double(), f64(expected), rtol=1e-6, atol=1e-6)


def test_a_response_whose_others_have_all_failed_has_nothing_to_be_compared_with():
    close(compute_rloo(f64([1, 2, 3]), torch.tensor([0, 0, 4])), [-1.0, 1.0, 0.0])


def test_group_relative_by_hand():
    rewards, groups = f64([1, 3, 0, 0]), torch.tensor([0, 0, 1, 1])
    # means 2 and 0; std of group 0 is 1; group 1 is constant: 0 and not NaN
    close(compute_group_relative(rewards, groups, AdvantageStd.none, StdOf.raw), [-1.0, 1.0, 0.0, 0.0])
    close(compute_group_relative(rewards, groups, AdvantageStd.group, StdOf.raw), [-1.0, 1.0, 0.0, 0.0], 2e-6)
    # batch: mean 1, squares 0, 4, 1, 1, so std = sqrt(6/4); centered -1, 1, 0, 0: std = sqrt(2/4)
    raw, centered = 1.5**-0.5, 0.5**-0.5
    found = compute_group_relative(rewards, groups, AdvantageStd.batch, StdOf.raw)
    close(found, [-raw, raw, 0.0, 0.0], 3e-6)
    found = compute_group_relative(rewards, groups, AdvantageStd.batch, StdOf.centered)
    close(found, [-centered, centered, 0.0, 0.0], 3e-6)


def test_a_group_of_equal_rewards_is_exactly_zero_in_float32():
    # The mean of three 0.1 differs from 0.1 by rounding, which 1e-6 in the denominator would blow up.
    rewards, groups = torch.full((3,), 0.1), torch.zeros(3, dtype=torch.int64)
    for std in AdvantageStd:
        assert compute_group_relative(rewards, groups, std, StdOf.raw).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_estimators_refuse_numbers_that_are_not_finite(bad):
    rewards, groups = f64([0.0, bad, 1.0, 2.0]), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(NonFiniteError, match="rewards: 1 of 4 entries are not finite"):
        compute_rloo(rewards, groups)
    with pytest.raises(NonFiniteError, match="rewards: 1 of 4 entries are not finite"):
        compute_group_relative(rewards, groups, AdvantageStd.batch, StdOf.centered)
