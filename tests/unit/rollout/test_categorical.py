"""Sampling of the CPU stand-ins."""

import sys

import pytest
import torch

from megarl.rollout.server import STANDINS


@pytest.fixture(scope="module")
def sample():
    sys.path.insert(0, str(STANDINS))
    try:
        import megarl_categorical

        yield megarl_categorical.sample
    finally:
        sys.path.remove(str(STANDINS))


def test_samples_follow_the_distribution_of_their_row(sample):
    torch.manual_seed(0)
    probs = torch.tensor([[0.5, 0.0, 0.2, 0.3], [0.05, 0.9, 0.05, 0.0]])
    num = 40000
    drawn = sample(probs.repeat_interleave(num, 0)).view(2, num)
    assert drawn.dtype == torch.int32
    for row in range(2):
        shares = torch.bincount(drawn[row].long(), minlength=4) / num
        # Four standard errors of a share are at most 4 * 0.5 / sqrt(40000) = 0.01.
        torch.testing.assert_close(shares, probs[row], atol=0.01, rtol=0)
        assert (shares[probs[row] == 0] == 0).all()


def test_a_draw_at_the_very_top_of_the_unit_interval_stays_inside(sample, monkeypatch):
    top = torch.nextafter(torch.ones(1, 1), torch.zeros(1, 1))
    monkeypatch.setattr(torch, "rand_like", lambda total: top.expand_as(total).clone())
    for size in (1, 7, 49152):
        probs = torch.full((3, size + 1), 1.0 / size)
        probs[:, -1] = 0.0
        assert (sample(probs) < size).all()


def test_a_draw_of_zero_skips_leading_zeros(sample, monkeypatch):
    monkeypatch.setattr(torch, "rand_like", torch.zeros_like)
    assert sample(torch.tensor([[0.0, 0.0, 1.0]])).tolist() == [2]
