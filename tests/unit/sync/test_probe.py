"""The pure parts of the proof."""

import math

import pytest

from megarl.config.schema.roles import Dtype
from megarl.config.schema.rollout import RolloutConfig
from megarl.sync.probe import build_probe_tokens, compute_gap, get_max_gap
from megarl.types import Prompt


def test_the_largest_gap_is_found_at_its_position():
    gap, at = compute_gap([-0.5, -2.0, -3.0], [-0.6, -2.5, -3.1])
    assert gap == pytest.approx(0.25)  # 0.5 / 2
    assert at == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_logprob_that_is_no_number_is_an_infinite_gap(bad):
    assert compute_gap([-1.0, -2.0], [-1.0, bad]) == (math.inf, 1)


def test_the_allowed_gap_follows_the_coarser_dtype_unless_it_is_given():
    full, half = RolloutConfig(dtype=Dtype.float32), RolloutConfig(dtype=Dtype.bfloat16)
    assert get_max_gap(full, Dtype.float32) == 1e-4
    assert get_max_gap(full, Dtype.bfloat16) == get_max_gap(half, Dtype.float32) == 0.5
    assert get_max_gap(RolloutConfig(max_probe_logprob_gap=0.3), Dtype.float32) == 0.3


def test_the_probe_text_begins_with_the_prompts_and_visits_the_vocabulary():
    prompts = [Prompt("p", "ab", (5, 6), ""), Prompt("q", "c", (7,), "")]
    tokens = build_probe_tokens(prompts, 55)
    assert tokens == build_probe_tokens(prompts, 55)
    assert tokens[:3] == (5, 6, 7)
    assert len(tokens) == 64
    assert all(0 <= token < 55 for token in tokens)
    assert len(set(tokens)) > 40
