"""The arithmetic of tools/bench/overlap.py."""

from types import ModuleType, SimpleNamespace

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


def test_filled_places_are_averaged_over_the_time_without_pauses(overlap):
    # Of two places: two filled until 2, one until 4, paused from 4 to 6, one until 8, none until 10.
    spans = [(-1.0, 2.0), (0.0, 8.0), (0.0, 2.0)]
    found = overlap.measure_filled(spans, [(4.0, 6.0)], (0.0, 10.0), 2)
    assert found == pytest.approx((2 * 2 + 1 * 2 + 1 * 2) / 2 / 8)


def test_lengths_vary_by_their_spread_and_follow_from_the_name_alone(overlap):
    class Engine:
        def _build_params(self, request):
            return {"temperature": 1.0, "max_new_tokens": 640}

    engine = Engine()
    overlap.vary_lengths(engine, 640)
    requests = [SimpleNamespace(name=f"group-{i}/0/0") for i in range(400)]
    lengths = [engine._build_params(request)["max_new_tokens"] for request in requests]
    assert lengths == [engine._build_params(request)["max_new_tokens"] for request in requests]
    assert 32 <= min(lengths) < 36
    assert 600 < max(lengths) <= 640
    # Half of them on each side of the geometric mean.
    assert 160 < sum(length < 640 / 20**0.5 for length in lengths) < 240
