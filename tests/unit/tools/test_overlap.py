"""The arithmetic of tools/bench/overlap.py."""

from types import ModuleType

import pytest
from tool_loading import load_tool


@pytest.fixture(scope="module")
def overlap() -> ModuleType:
    return load_tool("bench/overlap.py")


def test_overlapping_spans_count_once(overlap):
    assert overlap.unite([(4.0, 5.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.0)]) == [(0.0, 3.0), (4.0, 5.0)]


def test_holes_are_cut_out_of_spans_wherever_they_lie(overlap):
    holes = [(-1.0, 1.0), (2.0, 3.0), (3.5, 5.0), (9.0, 9.5)]
    assert overlap.subtract([(0.0, 4.0), (9.0, 10.0)], holes) == [(1.0, 2.0), (3.0, 3.5), (9.5, 10.0)]


def test_a_share_is_of_the_window_alone(overlap):
    assert overlap.measure([(0.0, 3.0), (2.0, 4.0), (9.0, 20.0), (30.0, 40.0)], (1.0, 11.0)) == pytest.approx(0.5)
