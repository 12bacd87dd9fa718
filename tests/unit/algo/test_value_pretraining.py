"""When value pretraining ends, and what it learns."""

import numpy as np
import pytest

from megarl.algo.algorithm import build_pretraining_algo, find_end, fit_rise
from megarl.config.load import load_config
from megarl.config.schema.algo import ValuePretrainConfig


def test_it_ends_where_the_fitted_rise_is_smaller_than_asked_for_by_more_than_its_error():
    settings = ValuePretrainConfig(enabled=True, steps=9, patience=4, min_improvement=0.1)
    # 0.1, 0.3, 0.2, 0.4 rise by 0.08 a step on the line 0.13 + 0.08 t, 0.32 in 4 steps; residuals -0.03, 0.09, -0.09,
    # 0.03: sqrt(0.018 / 2 / 5) = 0.0424 a step, 0.170 in 4.
    assert fit_rise([0.1, 0.3, 0.2, 0.4]) == pytest.approx((0.32, 4 * (0.018 / 2 / 5) ** 0.5))
    assert find_end(settings, [0.1, 0.3, 0.2, 0.4]) is None
    # No noise: 0.01 a step are 0.04 in 4 steps. Fewer than 4 steps say nothing.
    assert find_end(settings, [0.3, 0.31, 0.32]) is None
    found = find_end(settings, [0.1, 0.3, 0.31, 0.32, 0.33])
    assert found == "explained variance has risen by 0.040 +- 0.000 in the last 4 (min 0.1)"
    # Level, but too noisy to tell: 0 +- 0.36.
    assert find_end(settings, [0.3, 0.1, 0.1, 0.3]) is None
    assert find_end(ValuePretrainConfig(enabled=True, steps=100, patience=None), [0.3] * 99) is None
    assert find_end(ValuePretrainConfig(enabled=True, steps=2), [0.1, 0.2]) == "algo.value_pretrain.steps=2 are done"
    aimed = ValuePretrainConfig(enabled=True, patience=None, stop_at_explained_variance=0.3)
    assert find_end(aimed, [0.1]) is None
    assert find_end(aimed, [0.1, 0.3]) == "explained variance has reached 0.300 (aimed at: 0.3)"


def simulate_ends(trend: np.ndarray, noise: float, num_runs: int = 300) -> list[int | None]:
    """The step at which each run ends by default; None: none before the last."""
    settings, generator, ends = ValuePretrainConfig(enabled=True, steps=1000), np.random.default_rng(0), []
    for _ in range(num_runs):
        curve = (trend + noise * generator.standard_normal(len(trend))).tolist()
        ends.append(next((n for n in range(1, len(curve)) if find_end(settings, curve[:n])), None))
    return ends


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("rise", [0.004, 0.006, 0.008])
def test_a_steady_rise_under_ordinary_noise_is_not_ended(rise, noise):
    ends = simulate_ends(0.1 + rise * np.arange(50), noise)
    assert sum(end is not None for end in ends) <= 0.03 * len(ends)


@pytest.mark.parametrize(("noise", "least"), [(0.0, 1.0), (0.02, 0.95), (0.05, 0.6)])
def test_a_plateau_is_found(noise, least):
    """A rise of 0.03 a step up to step 15; of 100 steps at most."""
    ends = simulate_ends(0.1 + 0.03 * np.minimum(np.arange(100), 15), noise)
    assert sum(end is not None and end <= 50 for end in ends) >= least * len(ends)
    assert sum(end is not None for end in ends) >= 0.98 * len(ends)
    # Never while it still rises, and for a few steps more.
    assert min(end for end in ends if end is not None) > 20


def test_value_pretraining_has_monte_carlo_returns_and_the_rewards_of_training():
    algo = load_config(["algo=vapo", "algo.kl.in_reward=true", "algo.kl.in_loss=true"]).algo
    pretraining = build_pretraining_algo(algo)
    assert (pretraining.lambda_critic, pretraining.lambda_policy) == (1.0, 1.0)
    assert pretraining.kl.in_reward
    assert not pretraining.kl.in_loss
    assert pretraining.reward_norm == algo.reward_norm
