"""tools/bench/driver.py: its two ways do the same."""

from types import ModuleType

import pytest
import torch
from tool_loading import load_tool


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_tool("bench/driver.py")


@pytest.mark.filterwarnings("ignore:length-adaptive")
@pytest.mark.parametrize("kind", ["equal", "varied"])
def test_objects_and_arrays_give_the_same_targets_and_metrics_bit_for_bit(bench, kind):
    lengths = bench.choose_lengths(kind, 20, 100)
    assert sum(lengths) == 2000
    answers = bench.make_answers(lengths)
    samples, metrics, _ = bench.run_arrays(answers, lengths, bench.Clock())
    expected, expected_metrics, _ = bench.run_objects(answers, lengths, bench.Clock())
    for name in ("mask", "loss_mask", "advantages", "returns", "old_values", "rollout_logprobs", "positive"):
        assert torch.equal(getattr(samples, name), getattr(expected, name))
    assert torch.equal(samples.sequences.tokens, expected.sequences.tokens)
    assert {name: metrics[name] for name in expected_metrics} == expected_metrics


def test_lengths_vary_20_times_and_have_as_many_tokens(bench):
    lengths = bench.choose_lengths("varied", 64, 8192)
    assert sum(lengths) == 64 * 8192
    assert max(lengths) == 8192
    assert sorted(lengths)[1] < 8192 / 15  # the first is what was left
