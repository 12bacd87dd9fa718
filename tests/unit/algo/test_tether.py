"""TETHER: a baseline between the group's and the critic's, and the weight that a batch gives the next one."""

import math

import pytest
import tether_reference
import torch
from algo_cases import (
    as_lists,
    configure,
    experiences,
    find_problems,
    make_experience,
    some,
    with_failures,
    with_turn_rewards,
)
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo.advantages import fit_rho, update_rho
from megarl.algo.targets import compute_targets
from megarl.config.schema.algo import TetherConfig

RHO, BATCH_RHO = "advantage/tether_rho", "advantage/tether_rho_batch"
TETHER = {"advantage": "tether", "surrogate": "logprob"}


def compute(e, **values):
    return compute_targets(e, configure(**{**TETHER, **values}), 0.3)


def close(found, expected, tol=1e-8):
    torch.testing.assert_close(found.double(), torch.as_tensor(expected, dtype=torch.float64), rtol=tol, atol=tol)


def test_the_next_weight_is_the_decayed_mean_and_stays_where_a_batch_gives_none():
    assert update_rho(0.5, {BATCH_RHO: 1.0}, TetherConfig(decay=0.95)) == pytest.approx(0.525)
    assert update_rho(0.5, {}, TetherConfig()) == 0.5
    assert fit_rho(0.0, 0.0) is None
    assert fit_rho(-1.0, 2.0) == 0.0


@some
@given(experiences(), st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([0.9, 1.0]), st.booleans(), st.booleans())
def test_tether_targets_equal_the_reference(e, rho, lambda_critic, kl, turns):
    if turns:
        e = with_turn_rewards(e, 3)
    algo = configure(**TETHER, tether__initial=rho, lambda_critic=lambda_critic, kl__in_reward=kl)
    samples, metrics = compute_targets(e, algo, 0.3)
    advantages, returns, fitted = tether_reference.targets(as_lists(e), algo, 0.3)
    close(samples.advantages, advantages)
    close(samples.returns, returns)
    assert all(math.isfinite(x) for x in metrics.values()), metrics
    assert (fitted is None) == (BATCH_RHO not in metrics)
    assert fitted is None or metrics[BATCH_RHO] == pytest.approx(fitted, abs=1e-6)


@some
@given(experiences(), st.booleans(), st.booleans())
def test_weight_zero_is_leave_one_out_and_weight_one_the_return_minus_the_value(e, kl, turns):
    if turns:
        e = with_turn_rewards(e, 5)
    group, _ = compute(e, tether__initial=0.0, kl__in_reward=kl)
    rloo, _ = compute_targets(e, configure(advantage="rloo", kl__in_reward=kl), 0.3)
    assert torch.equal(group.advantages, rloo.advantages)
    value, _ = compute(e, tether__initial=1.0, kl__in_reward=kl)
    gae, _ = compute_targets(e, configure(lambda_policy=1.0, lambda_critic=1.0, kl__in_reward=kl), 0.3)
    torch.testing.assert_close(value.advantages, gae.advantages, rtol=1e-12, atol=1e-12)
    assert torch.equal(value.returns, gae.returns)


@some
@given(experiences(min_group=2), st.data())
def test_failed_samples_are_as_if_they_were_not_there(e, data):
    failed = [data.draw(st.booleans()) for _ in e.groups]
    samples, metrics = compute(with_failures(e, failed), tether__initial=0.4)
    kept = [row for row, lost in enumerate(failed) if not lost]
    alone, expected = compute(e.select(torch.tensor(kept, dtype=torch.int64)), tether__initial=0.4)
    assert torch.equal(samples.advantages[kept], alone.advantages)
    assert metrics.get(BATCH_RHO) == expected.get(BATCH_RHO)


def test_the_fitted_weight_predicts_better_than_either_baseline_alone():
    e = make_experience([0] * 8 + [1] * 8, [9] * 16, [float(i % 3 == 0) for i in range(16)], [False] * 16, 4)

    def error(rho):
        samples, metrics = compute(e, tether__initial=rho)
        return float(samples.advantages.square().sum()), metrics[BATCH_RHO]

    best = error(0.0)[1]
    assert 0 < best < 1
    assert error(best)[0] < min(error(0.0)[0], error(1.0)[0], error(best - 0.01)[0], error(best + 0.01)[0])


def test_a_group_of_one_has_no_fit_and_gamma_and_group_means_are_refused():
    e = make_experience([0], [3], [1.0], [False], 0, holes=False)
    assert BATCH_RHO not in compute(e)[1]
    assert any("train.responses_per_prompt: 1 found" in text for text in find_problems(configure(**TETHER), 1, 1))
    assert any(text.startswith("algo.gamma: 0.9 found") for text in find_problems(configure(**TETHER, gamma=0.9), 4, 1))
    assert any(
        "algo.tether.decay: found 1.5" in text for text in find_problems(configure(**TETHER, tether__decay=1.5), 4, 1)
    )
    assert find_problems(configure(**TETHER), 4, 1) == []
