"""GAE and its variants, REINFORCE, RLOO, group-relative advantages, whitening."""

import pytest
import reference
import torch
from algo_cases import close, f64

from megarl.algo.advantages import compute_gae, compute_group_relative, compute_rloo
from megarl.algo.statistics import NonFiniteError, compute_discounted_sums
from megarl.config.schema.algo import AdvantageStd, StdOf

ALL = torch.ones(1, 3, dtype=torch.bool)


def test_gae_by_hand():
    # gamma 0.9, lambda 0.5: delta_3 = 1 - 3 = -2; delta_2 = 0.9*3 - 2 = 0.7; delta_1 = 0.9*2 - 1 = 0.8
    # A_3 = -2; A_2 = 0.7 - 0.45*2 = -0.2; A_1 = 0.8 - 0.45*0.2 = 0.71
    found = compute_gae(f64([[0, 0, 1]]), f64([[1, 2, 3]]), ALL, 0.9, 0.5)
    close(found, [[0.71, -0.2, -2.0]])


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
