"""TETHER: a baseline between the group's and the critic's, and the weight that a batch gives the next one."""

import math

import pytest
import reference
from algo_cases import as_lists, close, configure, experiences, find_problems, make_experience, some, with_turn_rewards
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo.advantages import fit_rho, update_rho
from megarl.algo.algorithm import compute_targets
from megarl.config.schema.algo import TetherConfig

RHO, BATCH_RHO = "advantage/tether_rho", "advantage/tether_rho_batch"
TETHER = {"advantage": "tether", "surrogate": "logprob"}


def compute(e, **values):
    return compute_targets(e, configure(**{**TETHER, **values}), 0.3)


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
    advantages, returns, fitted = reference.tether_targets(as_lists(e), algo, 0.3)
    close(samples.advantages, advantages, 1e-8)
    close(samples.returns, returns, 1e-8)
    assert all(math.isfinite(x) for x in metrics.values()), metrics
    assert (fitted is None) == (BATCH_RHO not in metrics)
    assert fitted is None or metrics[BATCH_RHO] == pytest.approx(fitted, abs=1e-6)


def test_a_group_of_one_has_no_fit_and_gamma_and_group_means_are_refused():
    e = make_experience([0], [3], [1.0], [False], 0, holes=False)
    assert BATCH_RHO not in compute(e)[1]
    for values, responses, message in (
        ({}, 1, "train.responses_per_prompt: 1 found"),
        ({"gamma": 0.9}, 4, "algo.gamma: 0.9 found"),
        ({"tether__decay": 1.5}, 4, "algo.tether.decay: found 1.5"),
    ):
        assert any(message in text for text in find_problems(configure(**TETHER, **values), responses, 1))
    assert find_problems(configure(**TETHER), 4, 1) == []
