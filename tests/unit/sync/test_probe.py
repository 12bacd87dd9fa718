"""The pure parts of the proof."""

import math

import pytest

from megarl.config.roles import Dtype
from megarl.config.rollout import RolloutConfig
from megarl.sync.probe import build_probe_tokens, compute_gap, get_max_gap


def test_the_largest_gap_is_found_at_its_position():
    gap, at = compute_gap([-1.0, -2.0, -3.0], [-1.0, -2.5, -3.1])
    assert gap == pytest.approx(0.5)
    assert at == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_logprob_that_is_no_number_is_an_infinite_gap(bad):
    assert compute_gap([-1.0, -2.0], [-1.0, bad]) == (math.inf, 1)


def test_the_allowed_gap_follows_the_dtype_unless_it_is_given():
    assert get_max_gap(RolloutConfig(dtype=Dtype.float32)) == 1e-3
    assert get_max_gap(RolloutConfig(dtype=Dtype.bfloat16)) == 0.25
    assert get_max_gap(RolloutConfig(max_probe_logprob_gap=0.5)) == 0.5


def test_the_probe_text_is_fixed_and_inside_the_vocabulary():
    tokens = build_probe_tokens(55)
    assert tokens == build_probe_tokens(55)
    assert len(tokens) == 32
    assert all(0 <= token < 55 for token in tokens)
    assert len(set(tokens)) > 15
