"""The pure parts of the loop."""

import pytest

from megarl.minibatches import average_steps


def test_metrics_of_optimizer_steps_are_averaged_and_maxima_kept():
    steps = [{"policy/loss": 1.0, "policy/ratio_max": 3.0}, {"policy/loss": 3.0, "policy/ratio_max": 2.0}]
    assert average_steps(steps) == {"policy/loss": 2.0, "policy/ratio_max": 3.0}


def test_sums_are_added_over_the_optimizer_steps():
    assert average_steps([{"a_sum": 1.0}, {"a_sum": 3.0}]) == {"a_sum": 4.0}


def test_a_metric_of_some_steps_only_is_averaged_over_those():
    assert average_steps([{"a": 1.0}, {"b": 2.0}]) == pytest.approx({"a": 1.0, "b": 2.0})
