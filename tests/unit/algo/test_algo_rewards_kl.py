"""Reward shaping, KL estimators, the adaptive KL coefficient, running moments."""

from dataclasses import replace

import pytest
import reference
import torch
from algo_cases import as_lists, close, configure, experiences, f64, make_experience, norm, some, start_kl
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo.algorithm import (
    compute_adapted_coef,
    compute_kl,
    compute_normalised_rewards,
    compute_shaped_rewards,
    compute_targets,
    compute_token_kl,
    compute_turn_rewards,
    update_reward_moments,
)
from megarl.algo.statistics import NonFiniteError, RunningMoments, merge_moments, split_blocks
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema.algo import AdvantageStd, KLEstimator


def test_the_full_kl_comes_from_the_models_and_not_from_log_probs():
    with pytest.raises(ValueError, match="KL estimator full: it has no formula"):
        compute_kl(f64([0.0]), f64([0.0]), KLEstimator.full)
    e = make_experience([0, 0], [2, 4], [1.0, 0.0], [False, False], 3)
    (block,) = split_blocks(e.mask)
    found = compute_token_kl(replace(e, ref_logprobs=None), KLEstimator.full, block)
    assert torch.equal(found, e.ref_kl[e.mask])
    with pytest.raises(ValueError, match=r"ref_kl: none found; algo\.kl\.reward_estimator=full"):
        compute_token_kl(replace(e, ref_kl=None), KLEstimator.full, block)


def test_k3_is_accurate_near_zero_in_float32():
    # d = 1e-4: k3 = d^2/2 to first order; exp(-d) - 1 + d in float32 would be off by several times that.
    found = compute_kl(torch.tensor([1e-4]), torch.tensor([0.0]), KLEstimator.k3)
    assert float(found) == pytest.approx(5e-9, rel=0.05, abs=4e-12)


@given(st.floats(1e-4, 10), st.floats(-5, 10), st.floats(1e-3, 10), st.floats(0.21, 50), st.integers(1, 4096))
def test_the_adaptive_coefficient_equals_the_reference_and_stays_above_0(coef, kl, target, ratio, num_samples):
    horizon = ratio * num_samples
    expected = reference.adapted_coef(coef, kl, target, horizon, num_samples)
    found = compute_adapted_coef(coef, kl, target, horizon, num_samples)
    assert found == pytest.approx(expected, rel=1e-12)
    assert found > 0


def test_a_kl_in_the_advantage_is_added_to_its_own_token_alone():
    e = make_experience([0, 0], [3, 2], [1.0, 0.0], [False, False], 3)
    old, teacher = f64([[-1.0, -2.0, -0.5], [-3.0, -1.0, 0.0]]), f64([[-0.5, -2.5, -0.5], [-1.0, -4.0, 0.0]])
    e = replace(e, old_logprobs=old, ref_logprobs=teacher)
    taught, mixed = (
        configure(advantage=name, kl__in_advantage=True, kl__advantage_coef=2.0) for name in ("none", "rloo")
    )
    samples, metrics = compute_targets(e, taught, 9.0)
    close(samples.advantages, [[1.0, -1.0, 0.0], [4.0, -6.0, 0.0]])
    assert metrics["kl/mean"] == pytest.approx((-0.5 + 0.5 + 0.0 - 2.0 + 3.0) / 5)
    # Of the rewards, 1 and 0, each response less the other: 1 and -1.
    samples, _ = compute_targets(e, mixed, 9.0)
    close(samples.advantages, [[2.0, 0.0, 1.0], [3.0, -7.0, 0.0]])
    bounded = replace(mixed, whiten_advantages=True, advantage_clip=2.5)
    samples, _ = compute_targets(e, bounded, 9.0)
    # Whitened before the teacher's part, clipped after it: 3 tokens of 1 and 2 of -1 have mean 0.2, std 0.96 ** 0.5.
    high, low = 0.8 / (0.96**0.5 + 1e-6), -1.2 / (0.96**0.5 + 1e-6)
    close(samples.advantages, [[high + 1.0, high - 1.0, high], [2.5, -2.5, 0.0]])
    assert low + 4.0 > 2.5 > -2.5 > low - 6.0


def test_the_expected_gradient_of_distillation_is_that_of_the_reverse_kl_of_the_next_token():
    """Over all tokens of a small vocabulary, weighted by the policy's own probability of sampling them."""
    logits, teacher = f64([0.3, -1.0, 0.8, 0.1]).requires_grad_(), f64([1.0, 0.2, -0.5, 0.0]).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), logits, retain_graph=True)
    e = make_experience([0, 1, 2, 3], [1, 1, 1, 1], [0.0] * 4, [False] * 4, 3)
    e = replace(e, old_logprobs=logprobs.detach()[:, None], ref_logprobs=teacher[:, None])
    samples, _ = compute_targets(e, configure(advantage="none", kl__in_advantage=True), 1.0)
    weighted = logprobs.detach().exp() * samples.advantages[:, 0] * logprobs
    (sampled,) = torch.autograd.grad(-weighted.sum(), logits)
    torch.testing.assert_close(sampled, exact)


def test_a_horizon_that_could_make_the_coefficient_negative_is_refused_before_anything_starts():
    # The default job has 256 samples per iteration: 0.2 * 256 = 51.2.
    keys = ("algo.kl.in_reward=true", "algo.kl.target=0.1")
    assert load_config([*keys, "algo.kl.horizon=51.3"]).algo.kl.horizon == 51.3
    for horizon in (51.2, 10):
        with pytest.raises(ConfigError, match=r"algo\.kl\.horizon: found .* must be above 51\.2 "):
            load_config([*keys, f"algo.kl.horizon={horizon}"])
    # It decides nothing for a fixed coefficient.
    load_config(["algo.kl.in_reward=true", "train.prompts_per_iteration=6400"])


def test_the_controller_moves_with_the_batch_and_a_fixed_one_stays():
    e = make_experience([0, 0], [3, 5], [1.0, 0.0], [False, False], 3, holes=False)
    config = configure(kl__in_reward=True, kl__coef=0.1, kl__target=0.01, kl__horizon=10.0).kl
    controller, metrics = start_kl(config).update(e)
    b = as_lists(e)
    d = [[o - r for o, r, m in zip(b.old[i], b.ref[i], b.mask[i], strict=True) if m] for i in range(2)]
    kl = (sum(d[0]) / 3 + sum(d[1]) / 5) / 2
    assert metrics == {"kl/coef": 0.1, "kl/compared": pytest.approx(kl)}
    error = min(max(kl / 0.01 - 1, -0.2), 0.2)
    assert controller.coef == pytest.approx(0.1 * (1 + error * 2 / 10))
    assert controller.coef != 0.1
    full = configure(
        kl__in_reward=True, kl__coef=0.1, kl__target=0.4, kl__horizon=10.0, kl__reward_estimator=KLEstimator.full
    )
    e = replace(e, ref_kl=torch.where(e.mask, 0.38, torch.nan), ref_logprobs=None)
    assert start_kl(full.kl).update(e)[0].coef == pytest.approx(0.1 * (1 - 0.05 * 2 / 10))
    fixed = start_kl(configure(kl__in_reward=True).kl)
    assert fixed.update(e)[0] == fixed
    assert start_kl(configure().kl).update(e)[1] == {}


def test_the_overlong_penalty_is_in_the_groups_statistics_and_needs_the_limit():
    e = make_experience([0, 0], [2, 10], [1.0, 1.0], [False, True], 0)
    algo = configure(overlong__penalty=1.0, overlong__buffer_frac=0.4, reward_norm=norm("group", "none"))
    close(compute_shaped_rewards(e, algo, 10), [0.5, -0.5])  # 1 and 0, mean 0.5
    with pytest.raises(ValueError, match=r"response_length: none found.*overlong"):
        compute_shaped_rewards(e, algo)


def test_the_scale_comes_before_the_overlong_penalty_and_the_running_moments():
    # A wrong short answer, a right one at the limit, both: -1, 1 - 1, -1 - 1.
    e = make_experience([0, 0, 0], [2, 10, 10], [0.0, 1.0, 0.0], [False, True, True], 0)
    algo = configure(overlong__penalty=1.0, overlong__buffer_frac=0.4)
    close(compute_shaped_rewards(e, algo, 10, wrong=-1.0), [-1.0, 0.0, -2.0])
    moments = update_reward_moments(RunningMoments(), e, algo, 10, -1.0)
    assert (moments.count, moments.mean) == (3, -1.0)


def test_a_source_scales_its_rewards_of_responses_and_turns_and_has_a_length_limit_of_its_own():
    # Scaled to -1, 1, -1 by `wrong`, then by 3, 3 and 0.5; a response of 4 tokens is at the limit of its source only.
    e = make_experience([0, 0, 1], [2, 4, 4], [0.0, 1.0, 0.0], [False, False, True], 0, holes=False)
    algo = configure(overlong__penalty=1.0, overlong__buffer_frac=0.5)
    turns = torch.zeros_like(e.old_logprobs)
    turns[:, 0] = 1.0
    e = replace(e, reward_scales=f64([3.0, 3.0, 0.5]), length_limits=torch.tensor([10, 10, 4]), turn_rewards=turns)
    close(compute_shaped_rewards(e, algo, 10, wrong=-1.0), [-3.0, 3.0, -1.5])
    found = compute_turn_rewards(e, algo, 10, wrong=-1.0)
    close(found[:, 0], [6.0, 6.0, 1.0])
    plain = replace(e, reward_scales=None, length_limits=None)
    close(compute_shaped_rewards(plain, algo, 10, wrong=-1.0), [-1.0, 1.0, -1.0])


SCOPES = ["none", "batch", "group", "running"]


@some
@given(experiences(), st.sampled_from(SCOPES), st.sampled_from(SCOPES), st.lists(st.sampled_from([0.0, 0.3, 2.0])))
def test_reward_normalisation_equals_the_reference(e, mean, std, earlier):
    b = as_lists(e)
    moments = merge_moments(merge_moments(RunningMoments(), f64(earlier)), e.rewards)
    found = compute_normalised_rewards(e.rewards, e.groups, norm(mean, std), moments)
    close(found, reference.normalise(b.rewards, b.groups, mean, std, [*earlier, *b.rewards]), 1e-8)


@some
@given(st.lists(st.lists(st.floats(-10, 10), max_size=5), min_size=1, max_size=4))
def test_running_moments_are_those_of_everything_so_far(batches):
    moments, seen = RunningMoments(), [x for batch in batches for x in batch]
    for batch in batches:
        moments = merge_moments(moments, f64(batch))
    assert moments.count == len(seen)
    if seen:
        assert moments.mean == pytest.approx(reference.mean(seen), abs=1e-9)
        assert moments.std == pytest.approx(reference.std(seen), abs=1e-7)


def test_running_normalisation_without_moments_is_an_error_and_with_them_works():
    e = make_experience([0, 0], [2, 2], [0.0, 4.0], [False, False], 0)
    algo = configure(reward_norm=norm("running", "running"))
    with pytest.raises(ValueError, match="reward_moments"):
        compute_shaped_rewards(e, algo)
    moments = update_reward_moments(RunningMoments(), e, algo)
    close(compute_shaped_rewards(e, algo, reward_moments=moments), [-1.0, 1.0], 2e-6)  # mean 2, std 2
    equal = merge_moments(RunningMoments(), f64([0.1, 0.1, 0.1]))
    found = compute_normalised_rewards(f64([0.1]), torch.tensor([0]), norm("none", "running"), equal)
    assert found.tolist() == [0.0]


def test_a_reward_that_is_not_finite_is_refused_with_its_row():
    e = make_experience([0, 1, 2], [2, 2, 2], [0.0, 1.0, float("nan")], [False] * 3, 0)
    with pytest.raises(NonFiniteError, match="rewards: 1 of 3 entries are not finite, first in row 2"):
        compute_shaped_rewards(e, configure())


def test_parts_are_normalised_in_their_groups_by_themselves_and_summed_which_with_lite_ppo_is_gdpo():
    """Group 0: part a is 1, 0, part b 0, 4: N(a) = 1, -1, N(b) = -1, 1. Group 1: a is equal, N(b) = 1, -1. With the
    weights 1 and 0.5 the sums are 0.5, -0.5, 0.5, -0.5 of mean 0 and std 0.5."""
    e = make_experience([0, 0, 1, 1], [2, 1, 1, 1], [9.0, 9.0, 0.0, 7.0], [False] * 4, 0, holes=False)
    e = replace(e, reward_parts=f64([[1, 0], [0, 4], [1, 3], [1, 1]]))
    algo = configure(advantage="group", advantage_std=AdvantageStd.batch, reward_norm__parts={"a": 1.0, "b": 0.5})
    close(compute_shaped_rewards(e, algo), [0.5, -0.5, 0.5, -0.5], 1e-5)
    samples, _ = compute_targets(e, algo, 0.0)
    close(samples.advantages[:, 0], [1.0, -1.0, 1.0, -1.0], 1e-5)
    # What decides about a correct response stays its score.
    assert samples.positive.tolist() == [True, True, False, True]
    for wrong, message in (
        ({"reward_parts": None}, "a, b found with no reward_parts"),
        ({"turn_rewards": torch.zeros(e.mask.shape)}, "found with rewards within the responses"),
    ):
        with pytest.raises(ValueError, match=rf"algo\.reward_norm\.parts: .*{message}"):
            compute_shaped_rewards(replace(e, **wrong), algo)
